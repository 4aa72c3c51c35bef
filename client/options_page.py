"""The page docs/options.md, made from the model, so that it cannot say anything else than the code does.

`python -m lastgood.client.options_page > docs/options.md` (or `make docs`) writes it; a test compares the two.
"""

from __future__ import annotations

import sys

from pydantic_core import PydanticUndefined

from ..coordinator.option_names import ALIASES
from ..coordinator.options import ENV_PREFIX, Options, option_takes

_TOP = """\
# Options

Made from the model by `make docs`; do not edit.

Every option can be given in three ways. What comes first here wins:

1. as a keyword: `lastgood.attach("qwen-grpo", save_freq=20)`
2. as an environment variable of the driver: `{prefix}SAVE_FREQ=20` (an empty one counts as not set; lists as `a,b` or
   JSON, mappings as `name=value,name=value` or JSON)
3. in a YAML file, as `save_freq: 20`; the file is `config=` or `{prefix}CONFIG`
4. else the default holds

A name that is not known is an error that says the nearest known one. `_s` is seconds, `_bytes` is bytes. Keys and
passwords do not belong in options; should a URL hold one, errors show `***` in its place.

| option | default | takes | what it does |
| --- | --- | --- | --- |
"""

_ALIASES = """
## Other names for the same things

Names of verl and Hugging Face are taken as keywords, in YAML and in the environment. `None` is "not given". Two names
for one option with different values in one place are an error.

| name | option | known from |
| --- | --- | --- |
"""

_STAGING = """
## The staging template

`staging` may differ from node to node. It is filled in on each node:

| placeholder | becomes |
| --- | --- |
| `{label:NAME}` | the node's Ray label NAME (`ray start --labels NAME=value`); an error lists the labels it has |
| `{env:NAME}` | the environment variable NAME on that node |
| `{hostname}` | the node's host name |
| `{node_ip}` | the node's IP address as Ray knows it |

Example: `staging="{label:nvme}/lastgood"`. The result must be an absolute path outside of Ray's session directory.
"""


def options_page() -> str:
    """The whole page, in Markdown."""
    rows = []
    for name, field in Options.model_fields.items():
        default = "(must be given)" if field.default is PydanticUndefined else f"`{_written(field.default)}`"
        rows.append(f"| `{name}` | {default} | {option_takes(field)} | {field.description} |\n")
    aliases = [f"| `{alias}` | `{field}` | {origin} |\n" for alias, (field, origin) in ALIASES.items()]
    return _TOP.format(prefix=ENV_PREFIX) + "".join(rows) + _ALIASES + "".join(aliases) + _STAGING


def _written(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value or value == 0 else "empty"


if __name__ == "__main__":
    sys.stdout.write(options_page())
