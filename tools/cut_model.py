"""Cut a GGUF model after its first layers: a draft model of the same tokenizer, for tests and comparisons.

Owns the copy. Does not train anything. Surprising rule: nothing between the last kept layer and the output is adapted,
so that what it proposes is poor; it shows that a draft model is served, not how good one can be.

    python -m tools.cut_model MODEL.gguf OUT.gguf --layers 4
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import gguf
import typer
from rich.console import Console

_BLOCK = re.compile(r"blk\.(\d+)\.")


def cut(source: Path, target: Path, layers: int) -> None:
    """Write the first `layers` layers of a model. Raises ValueError for more than it has."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    count = f"{architecture}.block_count"
    have = int(reader.fields[count].contents())
    if not 1 <= layers <= have:
        raise ValueError(f"--layers {layers}: the model has 1 to {have}")
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        value = layers if name == count else field.contents()
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        block = _BLOCK.match(tensor.name)
        if block is None or int(block[1]) < layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(
    source: Annotated[Path, typer.Argument(help="The GGUF file to cut.")],
    target: Annotated[Path, typer.Argument(help="The file to write.")],
    layers: Annotated[int, typer.Option(min=1, help="Layers to keep.")] = 4,
) -> None:
    """Write a GGUF model of the first layers of another."""
    cut(source, target, layers)
    Console().print(f"{target}: {layers} layers, {target.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    typer.run(main)
