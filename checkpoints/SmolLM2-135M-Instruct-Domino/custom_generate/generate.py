"""The draft as a decoding method: `target.generate(**inputs, custom_generate=ID, trust_remote_code=True, draft=ID)`."""

from functools import lru_cache
from os import PathLike

from transformers import AutoModel


@lru_cache(maxsize=1)
def _load(draft, revision, dtype, device):
    return AutoModel.from_pretrained(draft, revision=revision, dtype=dtype, trust_remote_code=True).to(device).eval()


def generate(model, draft=None, draft_revision=None, assistant_model=None, **kwargs):
    """
    What `model.generate(..., assistant_model=draft)` gives.

    Args:
        model (`PreTrainedModel`): the target.
        draft (`str` or `PreTrainedModel`): the id or folder of this repository, which is loaded once, or the draft.
        draft_revision (`str`, *optional*): of the repository.
        kwargs: any argument of `generate`.

    Raises:
        ValueError: when no draft is given.
    """
    draft = draft if draft is not None else assistant_model
    if draft is None:
        raise ValueError("`draft` is not given: name this repository once more, `draft=ID`, or pass the loaded draft.")
    if isinstance(draft, (str, PathLike)):
        draft = _load(str(draft), draft_revision, model.dtype, model.device)
    return model.generate(assistant_model=draft, **kwargs)
