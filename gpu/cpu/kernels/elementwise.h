/* RMSNorm and rotary embedding with the KV write. A template: level_*.c includes it once per element type, with
 * `element`, LOAD, STORE and FN(name) defined. All are bound by memory and read and write everything once.
 */

/* y = x / sqrt(mean(x^2) + eps) * weight, row by row. */
static void FN(rms_norm)(const void *x, const void *weight, void *y, int64_t rows, int64_t width, float eps)
{
    const element *w = weight;
    for (int64_t row = 0; row < rows; row++) {
        const element *from = (const element *)x + row * width;
        element *to = (element *)y + row * width;
        vf even = vf_set1(0), odd = even;
        int64_t i = 0;
        for (; i + 2 * LANES <= width; i += 2 * LANES) {
            vf a = LOAD(from + i), b = LOAD(from + i + LANES);
            even = vf_fma(a, a, even);
            odd = vf_fma(b, b, odd);
        }
        for (; i < width; i += LANES)
            even = vf_fma(LOAD(from + i), LOAD(from + i), even);
        vf scale = vf_set1(1 / sqrtf(vf_sum(vf_add(even, odd)) / width + eps));
        for (i = 0; i < width; i += LANES)
            STORE(to + i, vf_mul(LOAD(w + i), vf_mul(LOAD(from + i), scale)));
    }
}

/* Turn each pair (i, i + dim / 2) of one head by its angle, in the half-split layout of the Llama family. */
static inline void FN(rotate_head)(const element *from, element *to, const float *cosine, const float *sine, int64_t half)
{
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        vf low = LOAD(from + i), high = LOAD(from + half + i), c = vf_load_f32(cosine + i), s = vf_load_f32(sine + i);
        STORE(to + i, vf_sub(vf_mul(low, c), vf_mul(high, s)));
        STORE(to + half + i, vf_fma(high, c, vf_mul(low, s)));
    }
    for (; i < half; i++) {
        float low = TO_FLOAT(from[i]), high = TO_FLOAT(from[half + i]);
        to[i] = FROM_FLOAT(low * cosine[i] - high * sine[i]);
        to[half + i] = FROM_FLOAT(high * cosine[i] + low * sine[i]);
    }
}

/* Queries are rotated in place; keys rotated, and values, go straight to their slots of the pool. */
static void FN(rotate)(const Rotation *r, int64_t first_token, int64_t last_token)
{
    const int64_t dim = r->head_dim, half = dim / 2;
    for (int64_t token = first_token; token < last_token; token++) {
        element *head = (element *)r->qkv + token * (r->num_heads + 2 * r->num_kv_heads) * dim;
        const float *cosine = r->rotation + token * dim, *sine = cosine + half;
        for (int64_t h = 0; h < r->num_heads; h++, head += dim)
            FN(rotate_head)(head, head, cosine, sine, half);
        element *key = (element *)r->keys + r->slots[token], *value = (element *)r->values + r->slots[token];
        for (int64_t h = 0; h < r->num_kv_heads; h++, head += dim)
            FN(rotate_head)(head, key + h * dim, cosine, sine, half);
        memcpy(value, head, r->num_kv_heads * dim * sizeof(element));
    }
}
