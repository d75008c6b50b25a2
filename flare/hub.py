"""Models from a Hugging Face hub.

Owns what is fetched of a repository and how failures are told. Does not own the cache: `huggingface_hub` keeps it, and
serves from it without a network. Surprising rule: `HF_ENDPOINT` is read at each call, not when the library is loaded.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from flare.graphs.weights.errors import ModelError

PATTERNS = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def is_hub_id(name: str) -> bool:
    """`owner/name`, or `owner/name/path/file.gguf`."""
    return REPOSITORY.fullmatch(_repository(name)) is not None and (_file(name) == "" or name.endswith(".gguf"))


def fetch_from_hub(name: str) -> Path:
    """The directory of a repository's model files, or the one GGUF file that `name` goes on to. Raises `ModelError`."""
    repository, file = _repository(name), _file(name)
    endpoint = os.environ.get("HF_ENDPOINT")
    try:
        if file:
            return Path(hf_hub_download(repository, file, endpoint=endpoint))
        folder = Path(snapshot_download(repository, allow_patterns=list(PATTERNS), endpoint=endpoint))
        if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            return folder
        raise _nothing_usable(repository, endpoint)
    except ModelError:
        raise
    except GatedRepoError as error:
        raise ModelError(f"{repository} is gated: accept its terms on the hub and set HF_TOKEN ({error})") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is neither a file nor a hub repository {repository!r}; check the name") from error
    except LocalEntryNotFoundError as error:
        raise ModelError(f"{name} is not in the local cache and the hub cannot be reached ({error})") from error
    except Exception as error:  # whatever the library makes of the network and of the answers
        raise ModelError(f"cannot fetch {name} from the hub: {error}") from error


def _nothing_usable(repository: str, endpoint: str | None) -> ModelError:
    files = HfApi(endpoint=endpoint).list_repo_files(repository)
    quantized = [file for file in files if file.endswith(".gguf")]
    if quantized:
        names = ", ".join(f"{repository}/{file}" for file in quantized)
        return ModelError(f"{repository} holds GGUF files; name one of them: {names}")
    return ModelError(f"{repository} holds neither config.json with safetensors nor a GGUF file; it cannot be served")


def _repository(name: str) -> str:
    return "/".join(name.split("/")[:2])


def _file(name: str) -> str:
    return "/".join(name.split("/")[2:])
