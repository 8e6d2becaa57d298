"""How much of a prompt a step may compute beside decodes, so that these keep to `target_itl_ms`.

Every decode gets its token in every step, so a step's duration is everybody's gap between two tokens. With a target, a
chunk is the largest with which the step, as the fitted model predicts it (`step_time.py`), stays under it. It is never
less than one token, lest prompts starve where decodes alone take longer than the target; and `max_num_batched_tokens` still
limits it. Steps without decodes make nobody wait between tokens, and are not limited. Nor is anything before the model
has seen enough to predict.

A step must stay under the target less what predictions are usually wrong by, up to `MOST_MARGIN` of it: a target is missed by
every step that is only a little longer than was thought, and half of them are. More would only starve prompts: where steps
vary by more than that, no chunk holds the target.

The model learns from the steps that it makes the controller choose. If it believes a token to cost far too much (a
neighbour took the processor for a while), chunks of one token never show it that it is wrong. So truth has a say as well: a
step that leaves more than `UNUSED` of the target over lets the next chunk be a quarter larger, whatever is predicted, until
a step exceeds the target.
"""

from __future__ import annotations

from .draft import Draft
from .sequence import Sequence
from .step_time import Load, StepTimeModel, attended

MOST_MARGIN = 0.1
"""Of the target."""
UNUSED = 0.25
"""Of the target. More than the margin and the usual noise."""


class LatencyTarget:
    """Limits chunks. `target_s` is the time between two tokens that decodes should see; None: there is no limit."""

    def __init__(self, target_s: float | None, model: StepTimeModel) -> None:
        self.target_s = target_s
        self.model = model
        self._floor = 1  # tokens that a step had time for by what the last ones took, if more than was predicted

    def most_tokens(self, draft: Draft, seq: Sequence, most: int) -> int:
        """Up to `most` tokens of `seq` that `draft` has time for; one at least if it has no prefill yet."""
        if self.target_s is None or draft.num_decodes == 0:
            return most
        load, is_new = draft.load, seq not in draft.rows
        if self._fits(load, seq.num_computed, most, is_new=is_new):
            return most
        draft.was_cut = True
        low, high = 0, most  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            if self._fits(load, seq.num_computed, middle, is_new=is_new):
                low = middle
            else:
                high = middle
        return min(most, max(low, self._floor - draft.num_prefill_tokens))

    def on_step_done(self, draft: Draft, seconds: float) -> None:
        """A step took so long: whether chunks may be larger than is predicted."""
        if self.target_s is None or not draft.num_decodes or not draft.num_prefill_tokens:
            return
        if seconds > self.target_s:
            self._floor = 1
        elif draft.was_cut and seconds < (1 - UNUSED) * self.target_s:
            self._floor = draft.num_prefill_tokens + max(1, draft.num_prefill_tokens // 4)

    def _fits(self, load: Load, start: int, count: int, *, is_new: bool) -> bool:
        tokens, pairs, rows = load
        predicted_s = self.model.predict(Load(tokens + count, pairs + attended(start, count), rows + is_new))
        if predicted_s is None or self.target_s is None:
            return True
        return predicted_s + min(self.model.error_s, MOST_MARGIN * self.target_s) <= self.target_s
