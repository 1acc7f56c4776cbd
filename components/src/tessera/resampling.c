/* Resizes as Pillow's Resample.c does, to the bit, two rows and eight numbers at a time.

   Pixels are four bytes, the last of which is nobody's. The arithmetic is Pillow's: an output pixel's weights
   are made in double, in this order of operations, and rounded to 22 bits behind the point; rows are resized
   first, and their levels rounded to bytes before columns are. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#define BITS 22
#define HALF (1 << (BITS - 1))

/* Of what comes, of what is made and of what is between the two. */
#define MOST_SIDE 65535
#define MOST_PIXELS (1 << 24)

#ifdef __x86_64__
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

/* Two pixels, one above the other. */
typedef int32_t Pair __attribute__((vector_size(32)));

/* What an output pixel is made of: `count` pixels from `begin` on. */
typedef struct {
    int begin, count;
    const int32_t *weights;
} Taps;

static inline uint8_t level(int32_t sum) {
    sum >>= BITS;
    return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

/* The triangle, which reaches 1 pixel, or the cubic of -0.5, which reaches 2. */
static double height(double x, int reach) {
    const double a = -0.5;
    x = fabs(x);
    if (reach == 1) return x < 1 ? 1 - x : 0;
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static Taps *taps_of(int from, int to, int reach) {
    double scale = (double)from / to, wide = scale < 1 ? 1 : scale, support = reach * wide;
    size_t most = (size_t)ceil(support) * 2 + 1;
    Taps *taps = malloc((size_t)to * (sizeof(Taps) + most * sizeof(int32_t)));
    double *heights = malloc(most * sizeof(double));
    if (taps && heights) {
        int32_t *weights = (int32_t *)(taps + to);
        for (int at = 0; at < to; at++, weights += most) {
            double middle = (at + 0.5) * scale, sum = 0;
            int begin = (int)(middle - support + 0.5), end = (int)(middle + support + 0.5);
            begin = begin < 0 ? 0 : begin;
            end = end > from ? from : end;
            for (int tap = 0; tap < end - begin; tap++)
                sum += heights[tap] = height((tap + begin - middle + 0.5) * (1 / wide), reach);
            for (int tap = 0; tap < end - begin; tap++) {
                double part = sum != 0 ? heights[tap] / sum : heights[tap];
                weights[tap] = (int32_t)((part < 0 ? -0.5 : 0.5) + part * (1 << BITS));
            }
            taps[at] = (Taps){begin, end - begin, weights};
        }
    }
    free(heights);
    return taps;
}

/* `pairs` has room for `width` and `sums` for `to`. */
FAST static void across(const uint8_t *in, ptrdiff_t width, int high, const Taps *taps, ptrdiff_t to, Pair *pairs,
                        Pair *sums, uint8_t *out) {
    int32_t *wide = (int32_t *)pairs;
    const int32_t *made = (const int32_t *)sums;
    for (int row = 0; row < high; row += 2) {
        int below = row + 1 < high;
        const uint8_t *upper = in + 4 * width * row, *lower = upper + 4 * width * below;
        uint8_t *first = out + 4 * to * row, *second = first + 4 * to * below;
        for (ptrdiff_t x = 0; x < width; x++)
            for (int colour = 0; colour < 4; colour++) {
                wide[8 * x + colour] = upper[4 * x + colour];
                wide[8 * x + 4 + colour] = lower[4 * x + colour];
            }
        for (ptrdiff_t x = 0; x < to; x++) {
            Pair sum = {HALF, HALF, HALF, HALF, HALF, HALF, HALF, HALF};
            const Pair *from = pairs + taps[x].begin;
            const int32_t *weights = taps[x].weights;
            for (int tap = 0, count = taps[x].count; tap < count; tap++) sum += from[tap] * weights[tap];
            sums[x] = sum;
        }
        for (ptrdiff_t x = 0; x < to; x++)
            for (int colour = 0; colour < 4; colour++) {
                first[4 * x + colour] = level(made[8 * x + colour]);
                second[4 * x + colour] = level(made[8 * x + 4 + colour]);
            }
    }
}

/* `wide` are the bytes of a row, for which `sums` has room. */
FAST static void down(const uint8_t *in, ptrdiff_t wide, const Taps *taps, int to, int32_t *sums, uint8_t *out) {
    for (int y = 0; y < to; y++, out += wide) {
        for (ptrdiff_t x = 0; x < wide; x++) sums[x] = HALF;
        for (int tap = 0; tap < taps[y].count; tap++) {
            const uint8_t *row = in + wide * (taps[y].begin + tap);
            int32_t weight = taps[y].weights[tap];
            for (ptrdiff_t x = 0; x < wide; x++) sums[x] += row[x] * weight;
        }
        for (ptrdiff_t x = 0; x < wide; x++) out[x] = level(sums[x]);
    }
}

static int fits(int64_t width, int64_t high) {
    return 0 < width && width <= MOST_SIDE && 0 < high && high <= MOST_SIDE && width * high <= MOST_PIXELS;
}

/* Whether this function does such a thing. From Pillow 13 on, columns that lose more than twice what rows lose
   are resized first, and what is rounded in between differs by a level. */
int resizes(int64_t width, int64_t high, int64_t to_width, int64_t to_high) {
    return fits(width, high) && fits(to_width, to_high) && fits(to_width, high) &&
           (width == to_width || high <= to_high || high - to_high <= 2 * (width - to_width));
}

/* What `resizes`; whether there was memory for it. */
int resize(const uint8_t *in, int64_t width, int64_t high, uint8_t *out, int64_t to_width, int64_t to_high, int reach) {
    if (!resizes(width, high, to_width, to_high) || reach < 1 || reach > 2) return 0;
    size_t row = 4 * (size_t)to_width;
    Taps *columns = taps_of(width, to_width, reach), *rows = taps_of(high, to_high, reach);
    Pair *pairs = aligned_alloc(sizeof(Pair), (size_t)(width + to_width) * sizeof(Pair));
    uint8_t *middle = malloc(row * high);
    int32_t *sums = malloc(row * sizeof(int32_t));
    int enough = columns && rows && pairs && middle && sums;
    if (enough) {
        across(in, width, high, columns, to_width, pairs, pairs + width, middle);
        down(middle, row, rows, to_high, sums, out);
    }
    free(columns);
    free(rows);
    free(pairs);
    free(middle);
    free(sums);
    return enough;
}
