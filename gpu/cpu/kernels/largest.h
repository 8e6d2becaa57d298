/* The largest of `width` logits, and whether one is NaN or plus infinity: then the result means nothing. */
static float largest(const float *logits, int64_t width, bool *is_unfit)
{
    const int64_t whole = width / (2 * LANES) * 2 * LANES;
    vf even = vf_set1(-INFINITY), odd = even, zeros = vf_set1(0), more_zeros = zeros;
    for (int64_t i = 0; i < whole; i += 2 * LANES) {
        vf a = vf_load_f32(logits + i), b = vf_load_f32(logits + i + LANES);
        even = vf_max(even, a);
        odd = vf_max(odd, b);
        /* 0 times NaN or infinity is NaN, which no later sum takes away. */
        zeros = vf_fma(a, vf_set1(0), zeros);
        more_zeros = vf_fma(b, vf_set1(0), more_zeros);
    }
    float maximum = vf_largest(vf_max(even, odd)), zero = vf_sum(vf_add(zeros, more_zeros));
    for (int64_t i = whole; i < width; i++) {
        maximum = logits[i] > maximum ? logits[i] : maximum;
        zero += 0 * logits[i];
    }
    *is_unfit = false;
    /* Rare: a minus infinity is fit. */
    for (int64_t i = 0; zero != 0 && i < width; i++)
        *is_unfit |= !(logits[i] < INFINITY);
    return maximum;
}
