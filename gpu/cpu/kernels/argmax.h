/* The first largest logit of each row, and whether the row is fit to be sampled: no NaN, and a finite maximum. */
static void argmax(const float *logits, int64_t rows, int64_t stride, int64_t width, int32_t *tokens, uint8_t *finite)
{
    for (int64_t row = 0; row < rows; row++) {
        const float *x = logits + row * stride;
        const int64_t whole = width / LANES * LANES;
        vf largest = vf_set1(-INFINITY), sum = vf_set1(0);
        for (int64_t i = 0; i < whole; i += LANES) {
            vf a = vf_load_f32(x + i);
            largest = vf_max(largest, a);
            sum = vf_fma(a, vf_set1(0), sum); /* 0 times NaN or infinity is NaN: the sum tells whether there was one */
        }
        float maximum = vf_largest(largest), zero = vf_sum(sum);
        for (int64_t i = whole; i < width; i++) {
            maximum = x[i] > maximum ? x[i] : maximum;
            zero += 0 * x[i];
        }
        finite[row] = zero == 0;
        tokens[row] = 0;
        if (!finite[row]) {
            /* Rare: a minus infinity is fine, a NaN or plus infinity is not. */
            bool fit = maximum > -INFINITY && maximum < INFINITY;
            for (int64_t i = 0; i < width; i++)
                fit &= x[i] == x[i];
            finite[row] = fit;
        }
        if (finite[row])
            while (x[tokens[row]] != maximum)
                tokens[row]++;
    }
}
