/* Sampling for AVX-512. */
#ifdef __x86_64__
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#include "vec_avx512.h"
#include "sample.h"

enum Outcome sample_avx512(const Draw *draw, const float *logits, int64_t vocab, Workspace space, int32_t *token)
{
    return sample(draw, logits, vocab, space, token);
}
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
