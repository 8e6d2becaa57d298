"""Names of OpenTelemetry's semantic conventions for generative AI that are used here, as of version 1.41 (in development).

They still move: this file is where to follow them. What has no name there begins with `repertory.`.
"""

from __future__ import annotations

PROVIDER = "repertory"

OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_SEED = "gen_ai.request.seed"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"

CHAT = "chat"
TEXT_COMPLETION = "text_completion"

REQUEST_ID = "repertory.request.id"
NUM_PREEMPTIONS = "repertory.request.num_preemptions"
STALLED_SECONDS = "repertory.stalled.seconds"
STALLED_BY = "repertory.stalled.by"
"""Ids of the requests whose prompts cost this one the most, in falling order."""
