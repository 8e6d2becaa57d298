/* Vectors of sixteen floats: AVX-512 F, BW, DQ, VL; conversions by AVX512_BF16 where the file has it. */
#include <immintrin.h>
#include "repertory.h"

typedef __m512 vf;

#define LANES 16
#define BLOCK_ROWS 12 /* rows whose accumulators fit in the registers, two vectors each */

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* b where either is NaN. */
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_load_f32(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store_f32(float *p, vf a) { _mm512_storeu_ps(p, a); }

/* `a` where `limits` > `key`, minus infinity's stand-in elsewhere. */
static inline vf vf_visible(vf a, vf limits, float key)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(limits, vf_set1(key), _CMP_GT_OQ), vf_set1(-1e30f), a);
}

static inline float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
static inline float vf_largest(vf a) { return _mm512_reduce_max_ps(a); }

static inline vf vf_load_bf16(const bf16 *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void vf_store_bf16(bf16 *p, vf a)
{
#ifdef HAS_AVX512_BF16
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a));
#else
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); /* must not round into infinity */
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(rounded));
#endif
}

/* 2^a for a <= 127, to float's precision; the series of exp(f * ln 2) for |f| <= 1/2. NaN stays NaN. */
static inline vf vf_exp2(vf a)
{
    a = _mm512_max_ps(vf_set1(-126.f), _mm512_min_ps(vf_set1(127.f), a));
    vf whole = _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    vf f = vf_sub(a, whole);
    vf p = vf_set1(1.52527338e-5f);
    p = vf_fma(p, f, vf_set1(1.54035304e-4f));
    p = vf_fma(p, f, vf_set1(1.33335581e-3f));
    p = vf_fma(p, f, vf_set1(9.61812911e-3f));
    p = vf_fma(p, f, vf_set1(5.55041087e-2f));
    p = vf_fma(p, f, vf_set1(2.40226507e-1f));
    p = vf_fma(p, f, vf_set1(6.93147181e-1f));
    p = vf_fma(p, f, vf_set1(1.f));
    return _mm512_scalef_ps(p, whole);
}

/* a * 2^power for whole powers. */
static inline vf vf_scale(vf a, vf power) { return _mm512_scalef_ps(a, power); }

/* `a` where it is above `key`, 0 elsewhere; and how many are. */
static inline vf vf_above(vf a, float key) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, vf_set1(key), _CMP_GT_OQ), a); }

static inline int vf_num_above(vf a, float key)
{
    return __builtin_popcount(_mm512_cmp_ps_mask(a, vf_set1(key), _CMP_GT_OQ));
}

/* Those above `low` and not above `high`, to `to`, which has room for a whole vector. Returns their number. */
static inline int vf_pack(float *to, vf a, float low, float high)
{
    __mmask16 mask = _mm512_cmp_ps_mask(a, vf_set1(low), _CMP_GT_OQ);
    mask = _mm512_mask_cmp_ps_mask(mask, a, vf_set1(high), _CMP_LE_OQ);
    _mm512_storeu_ps(to, _mm512_maskz_compress_ps(mask, a));
    return __builtin_popcount(mask);
}

/* Sums in double. */
typedef struct {
    __m512d low, high;
} vd;

static inline vd vd_zero(void) { return (vd){_mm512_setzero_pd(), _mm512_setzero_pd()}; }

static inline vd vd_add(vd s, vf a)
{
    s.low = _mm512_add_pd(s.low, _mm512_cvtps_pd(_mm512_castps512_ps256(a)));
    s.high = _mm512_add_pd(s.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1)));
    return s;
}

static inline double vd_sum(vd s) { return _mm512_reduce_add_pd(_mm512_add_pd(s.low, s.high)); }
