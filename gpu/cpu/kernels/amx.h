/* What the AMX kernels share: tiles, transposition, pairs of bf16.
 *
 * A tile is 16 rows of 64 bytes. C += A x B multiplies A, 16 rows of 32 bf16, by B, whose row p holds the pairs
 * (2p, 2p + 1) of the depth for 16 columns, into 16 x 16 floats. All eight tiles are used whole.
 * Tile intrinsics of gcc 12 are asm statements that do not tell the compiler which memory they touch: FENCE stands between
 * them and ordinary loads and stores of the same buffers.
 */
#include <immintrin.h>
#include <stdalign.h>

#define FENCE __asm__ volatile("" ::: "memory")

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* In constant memory: for a local, gcc 12 drops most of the stores, since _tile_loadconfig claims to read 8 of its 64 bytes. */
static const alignas(64) TileShapes whole_tiles = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* 16 x 16 dwords. */
static inline void transpose(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88), b = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88), d = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        r[i] = t[i];
}

/* Sixteen pairs (first[i], second[i]), each rounded to bf16. */
static inline __m512i pairs(vf first, vf second)
{
    static const alignas(64) uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

/* 2^a for a <= 0 to the 8 bits of a bf16 and a few more; NaN stays NaN. Half the work of vf_exp2. */
static inline vf exp2_for_bf16(vf a)
{
    const vf magic = _mm512_set1_ps(12582912.f); /* 1.5 * 2^23: adding it rounds to an integer, kept in the low bits */
    a = _mm512_max_ps(_mm512_set1_ps(-126.f), a);
    vf whole = _mm512_add_ps(a, magic), f = _mm512_sub_ps(a, _mm512_sub_ps(whole, magic));
    vf p = _mm512_fmadd_ps(f, _mm512_set1_ps(0.0551716685f), _mm512_set1_ps(0.2426508185f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6932609255f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.9999251850f));
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(whole), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
}

/* Always inlined: gcc takes a function that only prefetches for one without effect, and drops its calls. */
INLINE void fetch_lines(const void *from, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        _mm_prefetch((const char *)from + 64 * i, _MM_HINT_T1);
}
