/* Digests, sketches and sums of squares of arrays in memory: one pass, one core, no allocation.
 *
 * What is computed is defined in constants.py and plan.py; portable.py computes the same in numpy.
 * The library knows nothing of Python and is called through ctypes, which releases the GIL.
 * Rows and blocks are treated while their bytes are in the first-level cache, so that memory is
 * read once for all results. Three versions of the inner loops, chosen by what the CPU has.
 */

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Digests are defined on little-endian words."
#endif

#define BLOCK 512   /* words of a digest's row, elements of a sketch's block */
#define BUCKETS 64
#define TURN 27     /* buckets that each block is turned further than the one before */
#define SIGN 0x80000000u
#define AHEAD 4096  /* bytes that are asked of memory before they are needed */

#ifdef __GNUC__
/* What is inlined is compiled anew for the instructions of the function that it is inlined into. */
#define INLINED static inline __attribute__((always_inline))
#else
#define INLINED static inline
#endif

/* What an element is; the same numbers are in values.py. */
enum kind { F32, F64, BF16, F16, I8, U8, I16, U16, I32, U32, I64, U64, LOOKUP };

typedef uint64_t digest_row(const char *words, const int32_t *table);
/* Adds to `squares`, too, where it is not NULL. */
typedef void sketch_block(const float *x, const int32_t *table, uint64_t hash, double *total,
                          double *squares);
typedef void widen_half(const char *from, float *to);
typedef double square_block(const float *x);
/* What is NULL of `digest`, `sketch` and `squares` is not wanted. */
typedef void one_array(const char *from, int64_t count, int64_t kind, const float *lookup,
                       const int32_t *table, uint64_t *digest, double *sketch, double *squares);

/* splitmix64 of a block's number: Steele, Lea & Flood 2014, "Fast splittable PRNGs". */
INLINED uint64_t block_hash(uint64_t block) {
    uint64_t z = (block + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* The top five bits of a hash choose the bit of the table that is the sign, the next negates. */
INLINED int sign_shift(uint64_t hash) { return (int)(hash >> 59); }
INLINED uint64_t block_sign(uint64_t hash) { return (hash << 5) & 0x8000000000000000ull; }

static uint64_t digest_row_plain(const char *words, const int32_t *table) {
    uint64_t sum = 0;
    for (int j = 0; j < BLOCK; j++) {
        int32_t word;
        memcpy(&word, words + 4 * j, 4);
        sum += (uint64_t)((int64_t)word * (int64_t)table[j]);
    }
    return sum;
}

/* Element 64 g + 8 v + l of a block belongs to bucket 8 ((v + g) mod 8) + l, before the turn. */
INLINED void sketch_block_double(double *x, const int32_t *table, uint64_t hash, double *total) {
    const int shift = sign_shift(hash);
    const uint64_t negate = block_sign(hash);
    for (int j = 0; j < BLOCK; j++) {
        uint64_t bits;
        memcpy(&bits, x + j, 8);
        bits ^= ((uint64_t)(((uint32_t)table[j] << shift) & SIGN) << 32) ^ negate;
        memcpy(x + j, &bits, 8);
    }
    for (int u = 0; u < 8; u++)
        for (int g = 0; g < 8; g++)
            for (int l = 0; l < 8; l++) total[8 * u + l] += x[g * 64 + ((u - g) & 7) * 8 + l];
}

/* Sums of squares are in double: in float, those of a million elements would be wrong by 1e-5. */
INLINED double sum_of(const double *sums, int count) {
    double sum = 0;
    for (int i = 0; i < count; i++) sum += sums[i];
    return sum;
}

INLINED double square_block_double(const double *x) {
    double sums[8] = {0};
    for (int j = 0; j < BLOCK; j += 8)
        for (int l = 0; l < 8; l++) sums[l] += x[j + l] * x[j + l];
    return sum_of(sums, 8);
}

static double square_block_plain(const float *x) {
    double sums[8] = {0};
    for (int j = 0; j < BLOCK; j += 8)
        for (int l = 0; l < 8; l++) {
            float element;
            memcpy(&element, x + j + l, 4);
            sums[l] += (double)element * (double)element;
        }
    return sum_of(sums, 8);
}

static void sketch_block_plain(const float *x, const int32_t *table, uint64_t hash, double *total,
                               double *squares) {
    if (squares) *squares += square_block_plain(x);
    const int shift = sign_shift(hash);
    const uint32_t negate = (uint32_t)(block_sign(hash) >> 32);
    float turned[BLOCK];
    for (int j = 0; j < BLOCK; j++) {
        uint32_t bits;
        memcpy(&bits, x + j, 4);
        bits ^= (((uint32_t)table[j] << shift) & SIGN) ^ negate;
        memcpy(turned + j, &bits, 4);
    }
    for (int u = 0; u < 8; u++) {
        double sums[8] = {0};
        for (int g = 0; g < 8; g++)
            for (int l = 0; l < 8; l++) sums[l] += (double)turned[g * 64 + ((u - g) & 7) * 8 + l];
        for (int l = 0; l < 8; l++) total[8 * u + l] += sums[l];
    }
}

/* Subnormal numbers not by way of subnormal floats, which a trainer may take for zero. */
static void widen_half_plain(const char *from, float *to) {
    for (int j = 0; j < BLOCK; j++) {
        uint16_t half;
        memcpy(&half, from + 2 * j, 2);
        const uint32_t rest = half & 0x7FFFu;
        uint32_t bits = (rest << 13) + (112u << 23);
        if (rest >= 0x7C00u) bits |= 0x7F800000u; /* infinity and NaN */
        if (rest < 0x0400u) {
            const float value = (float)(int32_t)rest * 5.9604644775390625e-8f; /* times 2^-24 */
            memcpy(&bits, &value, 4);
        }
        bits |= (uint32_t)(half & 0x8000u) << 16;
        memcpy(to + j, &bits, 4);
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f,avx512dq")))
#define AVX2 __attribute__((target("avx2,f16c")))

AVX512 static uint64_t digest_row_avx512(const char *words, const int32_t *table) {
    __m512i sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm512_setzero_si512();
    for (int j = 0; j < BLOCK; j += 32) {
        for (int i = 0; i < 2; i++) {
            const __m512i w = _mm512_loadu_si512(words + 4 * (j + 16 * i));
            const __m512i r = _mm512_loadu_si512(table + j + 16 * i);
            const __m512i even = _mm512_mul_epi32(w, r);
            const __m512i odd =
                _mm512_mul_epi32(_mm512_srli_epi64(w, 32), _mm512_srli_epi64(r, 32));
            sums[2 * i] = _mm512_add_epi64(sums[2 * i], even);
            sums[2 * i + 1] = _mm512_add_epi64(sums[2 * i + 1], odd);
        }
    }
    return (uint64_t)_mm512_reduce_add_epi64(_mm512_add_epi64(
        _mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3])));
}

AVX512 static void sketch_block_avx512(const float *x, const int32_t *table, uint64_t hash,
                                       double *total, double *squares) {
    const __m128i shift = _mm_cvtsi32_si128(sign_shift(hash));
    const __m512i sign = _mm512_set1_epi32((int32_t)SIGN);
    const __m512d negate = _mm512_castsi512_pd(_mm512_set1_epi64((int64_t)block_sign(hash)));
    __m512d sums[8], squared[2];
    for (int u = 0; u < 8; u++) sums[u] = _mm512_setzero_pd();
    squared[0] = squared[1] = _mm512_setzero_pd();
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
#pragma GCC unroll 4
        for (int v = 0; v < 8; v += 2) {
            const int first = g * 64 + v * 8, low = (v + g) & 7, high = (v + g + 1) & 7;
            const __m512i random = _mm512_sll_epi32(_mm512_loadu_si512(table + first), shift);
            /* 0x78: x ^ (random & sign) */
            const __m512i y = _mm512_ternarylogic_epi32(_mm512_loadu_si512(x + first), random, sign,
                                                        0x78);
            const __m256 lower = _mm256_castsi256_ps(_mm512_castsi512_si256(y));
            const __m256 upper = _mm256_castsi256_ps(_mm512_extracti64x4_epi64(y, 1));
            const __m512d one = _mm512_cvtps_pd(lower), other = _mm512_cvtps_pd(upper);
            sums[low] = _mm512_add_pd(sums[low], one);
            sums[high] = _mm512_add_pd(sums[high], other);
            squared[0] = _mm512_fmadd_pd(one, one, squared[0]);
            squared[1] = _mm512_fmadd_pd(other, other, squared[1]);
        }
    }
    for (int u = 0; u < 8; u++) {
        const __m512d signed_sum = _mm512_xor_pd(sums[u], negate);
        _mm512_storeu_pd(total + 8 * u, _mm512_add_pd(_mm512_loadu_pd(total + 8 * u), signed_sum));
    }
    if (squares) *squares += _mm512_reduce_add_pd(_mm512_add_pd(squared[0], squared[1]));
}

AVX512 static double square_block_avx512(const float *x) {
    __m512d sums[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm512_setzero_pd();
    for (int j = 0; j < BLOCK; j += 32) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m512d wide = _mm512_cvtps_pd(_mm256_loadu_ps(x + j + 8 * i));
            sums[i] = _mm512_fmadd_pd(wide, wide, sums[i]);
        }
    }
    return _mm512_reduce_add_pd(
        _mm512_add_pd(_mm512_add_pd(sums[0], sums[1]), _mm512_add_pd(sums[2], sums[3])));
}

AVX512 static void widen_half_avx512(const char *from, float *to) {
    for (int j = 0; j < BLOCK; j += 16) {
        const __m256i halves = _mm256_loadu_si256((const void *)(from + 2 * j));
        _mm512_storeu_ps(to + j, _mm512_cvtph_ps(halves));
    }
}

AVX2 static uint64_t digest_row_avx2(const char *words, const int32_t *table) {
    __m256i sums[4];
    uint64_t lanes[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_si256();
    for (int j = 0; j < BLOCK; j += 16) {
        for (int i = 0; i < 2; i++) {
            const __m256i w = _mm256_loadu_si256((const void *)(words + 4 * (j + 8 * i)));
            const __m256i r = _mm256_loadu_si256((const void *)(table + j + 8 * i));
            const __m256i even = _mm256_mul_epi32(w, r);
            const __m256i odd =
                _mm256_mul_epi32(_mm256_srli_epi64(w, 32), _mm256_srli_epi64(r, 32));
            sums[2 * i] = _mm256_add_epi64(sums[2 * i], even);
            sums[2 * i + 1] = _mm256_add_epi64(sums[2 * i + 1], odd);
        }
    }
    _mm256_storeu_si256((void *)lanes, _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                                        _mm256_add_epi64(sums[2], sums[3])));
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

AVX2 static double square_block_avx2(const float *x) {
    __m256d sums[4];
    double lanes[4];
    for (int i = 0; i < 4; i++) sums[i] = _mm256_setzero_pd();
    for (int j = 0; j < BLOCK; j += 16) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256d wide = _mm256_cvtps_pd(_mm_loadu_ps(x + j + 4 * i));
            sums[i] = _mm256_add_pd(sums[i], _mm256_mul_pd(wide, wide));
        }
    }
    _mm256_storeu_pd(lanes, _mm256_add_pd(_mm256_add_pd(sums[0], sums[1]),
                                          _mm256_add_pd(sums[2], sums[3])));
    return sum_of(lanes, 4);
}

/* Half of the buckets at a time: the sums of all do not fit into sixteen registers. By way of
 * memory, because floats are widened from there in one operation, and from registers in three. */
AVX2 static void sketch_block_avx2(const float *x, const int32_t *table, uint64_t hash,
                                   double *total, double *squares) {
    if (squares) *squares += square_block_avx2(x);
    const __m128i shift = _mm_cvtsi32_si128(sign_shift(hash));
    const __m256i sign = _mm256_set1_epi32((int32_t)SIGN);
    const __m256d negate = _mm256_castsi256_pd(_mm256_set1_epi64x((int64_t)block_sign(hash)));
    float turned[BLOCK];
    for (int j = 0; j < BLOCK; j += 8) {
        const __m256i random =
            _mm256_sll_epi32(_mm256_loadu_si256((const void *)(table + j)), shift);
        const __m256i y = _mm256_xor_si256(_mm256_loadu_si256((const void *)(x + j)),
                                           _mm256_and_si256(random, sign));
        _mm256_storeu_si256((void *)(turned + j), y);
    }
    for (int half = 0; half < 8; half += 4) {
        __m256d sums[8];
        for (int i = 0; i < 8; i++) sums[i] = _mm256_setzero_pd();
#pragma GCC unroll 8
        for (int g = 0; g < 8; g++) {
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                const float *from = turned + g * 64 + ((i / 2 + half - g) & 7) * 8 + i % 2 * 4;
                sums[i] = _mm256_add_pd(sums[i], _mm256_cvtps_pd(_mm_loadu_ps(from)));
            }
        }
        for (int i = 0; i < 8; i++) {
            double *to = total + 8 * half + 4 * i;
            const __m256d signed_sum = _mm256_xor_pd(sums[i], negate);
            _mm256_storeu_pd(to, _mm256_add_pd(_mm256_loadu_pd(to), signed_sum));
        }
    }
}

AVX2 static void widen_half_avx2(const char *from, float *to) {
    for (int j = 0; j < BLOCK; j += 8) {
        const __m128i halves = _mm_loadu_si128((const void *)(from + 2 * j));
        _mm256_storeu_ps(to + j, _mm256_cvtph_ps(halves));
    }
}
#endif

INLINED int size_of(int64_t kind) {
    switch (kind) {
        case F64: case I64: case U64: return 8;
        case F32: case I32: case U32: return 4;
        case BF16: case F16: case I16: case U16: return 2;
        default: return 1;
    }
}

#define WIDEN(to, type, expression)                     \
    for (int j = 0; j < BLOCK; j++) {                   \
        type element;                                   \
        memcpy(&element, from + j * sizeof(type), sizeof(type)); \
        (to)[j] = (expression);                         \
    }                                                   \
    break;

/* Adds one whole block of elements to the buckets `total`, which are turned already, and its
 * squares to `squares`; to neither where it is NULL. Those from `valid` on are bytes of zero, which
 * need not be what the lookup has for the number zero. */
INLINED void add_block(const char *from, int64_t valid, int64_t kind, const float *lookup,
                       const int32_t *table, uint64_t hash, double *total, double *squares,
                       sketch_block *add, widen_half *widen, square_block *square) {
    float narrow[BLOCK];
    double wide[BLOCK];
    const float *elements = narrow;
    switch (kind) {
        case F32: elements = (const float *)(const void *)from; break;
        case BF16:
            for (int j = 0; j < BLOCK; j++) {
                uint16_t element;
                memcpy(&element, from + 2 * j, 2);
                const uint32_t bits = (uint32_t)element << 16;
                memcpy(&narrow[j], &bits, 4);
            }
            break;
        case F16: widen(from, narrow); break;
        case I8: WIDEN(narrow, int8_t, (float)element)
        case U8: WIDEN(narrow, uint8_t, (float)element)
        case I16: WIDEN(narrow, int16_t, (float)element)
        case U16: WIDEN(narrow, uint16_t, (float)element)
        case F64: WIDEN(wide, double, element)
        case I32: WIDEN(wide, int32_t, (double)element)
        case U32: WIDEN(wide, uint32_t, (double)element)
        case I64: WIDEN(wide, int64_t, (double)element)
        case U64: WIDEN(wide, uint64_t, (double)element)
        default: WIDEN(narrow, uint8_t, j < valid ? lookup[(kind - LOOKUP) * 256 + element] : 0.0f)
    }
    if (kind != F32 && size_of(kind) >= 4) {
        if (squares) *squares += square_block_double(wide);
        if (total) sketch_block_double(wide, table, hash, total);
        return;
    }
    if (total)
        add(elements, table, hash, total, squares);
    else if (squares)
        *squares += square(elements);
}

INLINED void one_array_by(const char *from, int64_t count, int64_t kind, const float *lookup,
                          const int32_t *table, uint64_t *digest, double *sketch,
                          double *squares, digest_row *digest_of_row, sketch_block *add,
                          widen_half *widen, square_block *square) {
    const int64_t bytes = count * size_of(kind), step = BLOCK * size_of(kind);
    _Alignas(64) char padded[BLOCK * 8];
    double turned[2 * BUCKETS] = {0}; /* twice as long, so that no block is split by its turn */
    uint64_t sum = 0;
    double squared = 0;
    const int in_blocks = sketch || squares;
    int64_t block = 0, row = 0;
    for (int64_t at = 0; at < bytes; at += 4096) {
        const int64_t end = at + 4096 < bytes ? at + 4096 : bytes;
#ifdef __GNUC__
        for (int i = 0; i < 4096; i += 64) __builtin_prefetch(from + at + AHEAD + i);
#endif
        for (int64_t i = at; digest && i < end; i += 4 * BLOCK, row++) {
            const char *words = from + i;
            if (end - i < 4 * BLOCK) {
                memset(padded, 0, 4 * BLOCK);
                words = memcpy(padded, words, (size_t)(end - i));
            }
            sum += (block_hash((uint64_t)row) | 1) * digest_of_row(words, table);
        }
        for (int64_t i = at; in_blocks && i < end; i += step, block++) {
            const char *elements = from + i;
            if (end - i < step) {
                memset(padded, 0, (size_t)step);
                elements = memcpy(padded, elements, (size_t)(end - i));
            }
            double *total = sketch ? turned + (TURN * block) % BUCKETS : NULL;
            add_block(elements, (end - i) / size_of(kind), kind, lookup, table,
                      block_hash((uint64_t)block), total, squares ? &squared : NULL, add, widen,
                      square);
        }
    }
    if (digest) *digest = sum;
    if (squares) *squares = squared;
    for (int k = 0; sketch && k < BUCKETS; k++) sketch[k] = turned[k] + turned[k + BUCKETS];
}

static void one_array_plain(const char *from, int64_t count, int64_t kind, const float *lookup,
                            const int32_t *table, uint64_t *digest, double *sketch,
                            double *squares) {
    one_array_by(from, count, kind, lookup, table, digest, sketch, squares, digest_row_plain,
                 sketch_block_plain, widen_half_plain, square_block_plain);
}

#ifdef X86
AVX2 static void one_array_avx2(const char *from, int64_t count, int64_t kind, const float *lookup,
                                const int32_t *table, uint64_t *digest, double *sketch,
                                double *squares) {
    one_array_by(from, count, kind, lookup, table, digest, sketch, squares, digest_row_avx2,
                 sketch_block_avx2, widen_half_avx2, square_block_avx2);
}

AVX512 static void one_array_avx512(const char *from, int64_t count, int64_t kind,
                                    const float *lookup, const int32_t *table, uint64_t *digest,
                                    double *sketch, double *squares) {
    one_array_by(from, count, kind, lookup, table, digest, sketch, squares, digest_row_avx512,
                 sketch_block_avx512, widen_half_avx512, square_block_avx512);
}
#endif

static one_array *chosen = one_array_plain;

/* Chooses the instructions: 0 plain, 1 AVX2, 2 AVX-512, as far as the CPU has them. Returns which.
 * Not to be called while another thread computes. */
int rankscope_choose(int wanted) {
#ifdef X86
    __builtin_cpu_init();
    if (wanted >= 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
        chosen = one_array_avx512;
        return 2;
    }
    if (wanted >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        chosen = one_array_avx2;
        return 1;
    }
#endif
    (void)wanted;
    chosen = one_array_plain;
    return 0;
}

/* Digests, sketches and sums of squares of `arrays` contiguous arrays.
 *
 * addresses, counts, kinds: of each array its first byte, elements and kind. A kind LOOKUP + i is
 *     of bytes whose values are in row i of `lookup`, float [., 256].
 * rows: where the results of each array go.
 * table: int32 [BLOCK].
 * digests: uint64 [.]. sketches: double [., BUCKETS]. squares: double [.]. Each of them NULL where
 *     none are wanted. */
void rankscope_prints(int64_t arrays, const uint64_t *addresses, const int64_t *counts,
                      const int64_t *kinds, const int64_t *rows, const float *lookup,
                      const int32_t *table, uint64_t *digests, double *sketches,
                      double *squares) {
    for (int64_t i = 0; i < arrays; i++)
        chosen((const char *)(uintptr_t)addresses[i], counts[i], kinds[i], lookup, table,
               digests ? digests + rows[i] : NULL, sketches ? sketches + rows[i] * BUCKETS : NULL,
               squares ? squares + rows[i] : NULL);
}

/* What an output has to be for its unit to count as active; the same numbers are in kernel.py. */
enum activity { NOT_ZERO, INSIDE_ONE, INSIDE_HALF };

/* What is no number is not at the end of the range either, and larger than all. */
INLINED uint8_t is_active(float value, int activity, float end) {
    if (activity == NOT_ZERO) return !(value <= 0);
    if (activity == INSIDE_HALF) value = value * 2.0f - 1.0f;
    return !((value < 0 ? -value : value) > end);
}

/* Of one sample: `active` and, of NOT_ZERO, whether an output was 0. */
INLINED void active_in(const float *restrict from, int64_t units, int64_t inner, int activity,
                       float end, uint8_t *restrict active, uint8_t *restrict zero) {
    for (int64_t u = 0; u < units; u++) {
        uint8_t found = 0, none = 0;
        for (int64_t i = 0; i < inner; i++) {
            found |= is_active(from[u * inner + i], activity, end);
            if (activity == NOT_ZERO) none |= from[u * inner + i] == 0;
        }
        active[u] |= found;
        zero[u] |= none;
    }
}

INLINED void active_by(const float *x, int64_t outer, int64_t units, int64_t inner, int activity,
                       float end, uint8_t *active) {
    uint8_t zero[BLOCK];
    for (int64_t first = 0; first < units; first += BLOCK) {
        const int64_t count = units - first < BLOCK ? units - first : BLOCK;
        uint8_t *to = active + first;
        memset(to, 0, (size_t)count);
        memset(zero, 0, (size_t)count);
        for (int64_t o = 0; o < outer; o++) {
            const float *from = x + (o * units + first) * inner;
            if (inner == 1)
                active_in(from, count, 1, activity, end, to, zero);
            else
                active_in(from, count, inner, activity, end, to, zero);
        }
        /* Where all are below 0 the largest is not 0. */
        for (int64_t u = 0; activity == NOT_ZERO && u < count; u++) to[u] |= !zero[u];
    }
}

/* Whether each unit did something for any sample.
 *
 * x: float [outer, units, inner], contiguous. end: from where on an output is at an end of -1 to 1.
 * active: bytes [units], 1 for a unit of which
 *     NOT_ZERO: the largest output is not 0, as a ReLU's;
 *     INSIDE_ONE, INSIDE_HALF: some output is not at the ends of the range, -1 to 1 or 0 to 1. */
void rankscope_active(const float *x, int64_t outer, int64_t units, int64_t inner, int64_t activity,
                      float end, uint8_t *active) {
    switch (activity) {
        case NOT_ZERO: active_by(x, outer, units, inner, NOT_ZERO, end, active); break;
        case INSIDE_ONE: active_by(x, outer, units, inner, INSIDE_ONE, end, active); break;
        default: active_by(x, outer, units, inner, INSIDE_HALF, end, active);
    }
}

/* Changes with the meaning of anything above, so that a library built before is not used. */
int rankscope_version(void) { return 2; }
