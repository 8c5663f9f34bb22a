"""What a row's error means to the one who asked: the runner's words, as a typed error."""

from __future__ import annotations

from kernels.sampling import BAD_IDS, NOT_NUMBERS, NOTHING_LEFT
from schemas.errors import BadRequest, EngineFailed, HeadraceError, NotNumbers

__all__ = ["NOT_NUMBERS", "error_of"]


def error_of(message: str) -> HeadraceError:
    """Return the error of a failed sequence.

    Args:
        message: as in `Sampled.error` or `StepResult.failed`.

    Returns:
        `NotNumbers` for logits that are not finite; `BadRequest` where the request's own masks leave no token or name
        one that does not exist; `EngineFailed` else.
    """
    if message == NOT_NUMBERS:
        return NotNumbers(message)
    if message in (NOTHING_LEFT, BAD_IDS):
        return BadRequest(message, param="allowed_token_ids" if message == NOTHING_LEFT else "logit_bias")
    return EngineFailed(message)
