/* The kernels for AMX, bf16 only: linear layers and attention on tiles, the rest on AVX-512 vectors. */
#ifdef __x86_64__
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16")
#endif
#define HAS_AVX512_BF16
#include "vec_avx512.h"
#include "vectors.h"
#include "amx.h"
#include "amx_linear.h"
#include "amx_run.h"
#include "amx_pages.h"
#include "amx_decode.h"

const Kernels amx_bf16_kernels = {
    PANEL, pack_amx, linear_amx, rms_norm_bf16, rotate_bf16, attend_decodes_amx, attend_run_amx, largest,
};
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
