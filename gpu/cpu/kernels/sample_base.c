/* Sampling in plain C: any CPU. */
#include "vec_base.h"
#include "sample.h"

enum Outcome sample_base(const Draw *draw, const float *logits, int64_t vocab, Workspace space, int32_t *token)
{
    return sample(draw, logits, vocab, space, token);
}
