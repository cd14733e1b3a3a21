/* Rows copied and digested in one pass: every byte is fetched once, stored, and taken into the digest.
 *
 * The digest is XXH3 of 64 bits, without seed and with the default secret, of inputs longer than 240 bytes
 * (source: the xxHash specification, "XXH3 Algorithm Overview", section "Large inputs").
 * Of its own: loads of AVX2, stores that may go past the caches, and input and output in pieces.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Counted up with every change of what is below; who loads this asks for it. */
#define INTERFACE 1

int handoff_interface(void) { return INTERFACE; }

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define AVX2 __attribute__((target("avx2")))
#define STRIPE 64
#define BLOCK 1024 /* bytes between two scrambles: as many stripes as the secret has starts for */
#define SECRET_BYTES 192
#define AHEAD 1024 /* memory is asked for so long before it is read */

static const uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;
static const uint64_t PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u;
static const uint64_t PRIME64_5 = 0x27D4EB2F165667C5u, PRIME_MX1 = 0x165667919E3779F9u;

static const uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

typedef struct {
    __m256i low, high; /* eight accumulators of 64 bits */
} State;

AVX2 static inline __m256i load(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)at); }

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

AVX2 static inline __m256i mixed(__m256i sums, __m256i data, const uint8_t *secret) {
    const __m256i keyed = _mm256_xor_si256(data, load(secret));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    const __m256i neighbours = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(sums, neighbours));
}

AVX2 static inline State accumulated(State state, __m256i low, __m256i high, const uint8_t *secret) {
    state.low = mixed(state.low, low, secret);
    state.high = mixed(state.high, high, secret + 32);
    return state;
}

AVX2 static inline __m256i scrambled_half(__m256i sums, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    const __m256i shifted = _mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47));
    const __m256i keyed = _mm256_xor_si256(shifted, load(secret));
    const __m256i upper = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64(upper, 32));
}

AVX2 static inline State scrambled(State state) {
    const uint8_t *secret = SECRET + SECRET_BYTES - STRIPE;
    state.low = scrambled_half(state.low, secret);
    state.high = scrambled_half(state.high, secret + 32);
    return state;
}

static inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

AVX2 static uint64_t digest_of(State state, uint64_t num_bytes) {
    uint64_t sums[8], value = num_bytes * PRIME64_1;
    _mm256_storeu_si256((__m256i *)sums, state.low);
    _mm256_storeu_si256((__m256i *)(sums + 4), state.high);
    for (int i = 0; i < 4; i++) {
        const uint8_t *secret = SECRET + 11 + 16 * i;
        value += folded(sums[2 * i] ^ word(secret), sums[2 * i + 1] ^ word(secret + 8));
    }
    value = (value ^ (value >> 37)) * PRIME_MX1;
    return value ^ (value >> 32);
}

/* How a stripe goes to its target, if it does, and comes from its source: past the caches (a store needs 32 bytes
 * aligned), or through them. Known when compiled, so that no loop asks. */
enum { NOWHERE, PAST_CACHES, THROUGH_CACHES };

AVX2 static inline void store(uint8_t *to, __m256i low, __m256i high, int how) {
    if (how == PAST_CACHES) {
        _mm256_stream_si256((__m256i *)to, low);
        _mm256_stream_si256((__m256i *)(to + 32), high);
    } else if (how == THROUGH_CACHES) {
        _mm256_storeu_si256((__m256i *)to, low);
        _mm256_storeu_si256((__m256i *)(to + 32), high);
    }
}

/* num_bytes: a multiple of BLOCK. */
AVX2 static inline __attribute__((always_inline)) State blocks(
    State state, const uint8_t *from, uint8_t *to, size_t num_bytes, int store_how, int load_how) {
    for (size_t block = 0; block < num_bytes; block += BLOCK) {
        for (size_t at = block; at < block + BLOCK; at += STRIPE) {
            const __m256i low = load(from + at), high = load(from + at + 32);
            if (load_how == PAST_CACHES)
                _mm_prefetch((const char *)(from + at + AHEAD), _MM_HINT_NTA);
            else
                _mm_prefetch((const char *)(from + at + AHEAD), _MM_HINT_T0);
            store(to + at, low, high, store_how);
            state = accumulated(state, low, high, SECRET + (at - block) / 8);
        }
        state = scrambled(state);
    }
    return state;
}

#define BLOCKS_OF(store_how)                                                             \
    (load_how == PAST_CACHES ? blocks(state, from, to, num_bytes, store_how, PAST_CACHES) \
                             : blocks(state, from, to, num_bytes, store_how, THROUGH_CACHES))

AVX2 static State blocks_of(State state, const uint8_t *from, uint8_t *to, size_t num_bytes, int store_how,
                            int load_how) {
    if (store_how == NOWHERE)
        return BLOCKS_OF(NOWHERE);
    if (store_how == PAST_CACHES && (uintptr_t)to % 32 == 0)
        return BLOCKS_OF(PAST_CACHES);
    return BLOCKS_OF(THROUGH_CACHES);
}

/* What is left for the end: 1 to BLOCK bytes, and the last stripe, which may begin before them but within the piece.
 * It is taken from the target, so that what was stored was digested even if the source has changed. */
AVX2 static State last_of(State state, const uint8_t *from, uint8_t *to, size_t num_bytes) {
    const uint8_t *stored = from;
    if (to != NULL) {
        memcpy(to, from, num_bytes);
        stored = to;
    }
    for (size_t at = 0; at + STRIPE < num_bytes; at += STRIPE)
        state = accumulated(state, load(stored + at), load(stored + at + 32), SECRET + at / 8);
    const uint8_t *stripe = stored + num_bytes - STRIPE;
    return accumulated(state, load(stripe), load(stripe + 32), SECRET + SECRET_BYTES - STRIPE - 7);
}

int handoff_is_supported(void) { return __builtin_cpu_supports("avx2"); }

/* Copy rows, and write XXH3 of each to `digests`.
 *
 * A row is num_moves pieces: `moves` has for each where it lies from the row's beginning in the source, where in the
 * target, and its bytes: multiples of BLOCK but for the last, which is at least 64. More than 240 bytes in all.
 * target: NULL if nothing is to be copied. store_past, load_past: whether past the caches.
 */
AVX2 void handoff_copy_rows(const uint8_t *source, ptrdiff_t source_stride, uint8_t *target, ptrdiff_t target_stride,
                            size_t num_rows, const int64_t *moves, size_t num_moves, int store_past,
                            int load_past, uint64_t *digests) {
    const int store_how = target == NULL ? NOWHERE : store_past ? PAST_CACHES : THROUGH_CACHES;
    const int load_how = load_past ? PAST_CACHES : THROUGH_CACHES;
    for (size_t row = 0; row < num_rows; row++) {
        State state = {
            _mm256_set_epi64x((long long)PRIME64_3, (long long)PRIME64_2, (long long)PRIME64_1, (long long)PRIME32_3),
            _mm256_set_epi64x((long long)PRIME32_1, (long long)PRIME64_5, (long long)PRIME32_2, (long long)PRIME64_4)};
        const uint8_t *from = source + (ptrdiff_t)row * source_stride;
        uint8_t *to = target == NULL ? NULL : target + (ptrdiff_t)row * target_stride;
        uint64_t row_bytes = 0;
        for (size_t i = 0; i < num_moves; i++) {
            const int64_t *move = moves + 3 * i;
            const size_t num_bytes = (size_t)move[2];
            const size_t whole = i + 1 < num_moves ? num_bytes : (num_bytes - 1) / BLOCK * BLOCK;
            const uint8_t *piece = from + move[0];
            uint8_t *place = to == NULL ? NULL : to + move[1];
            state = blocks_of(state, piece, place, whole, store_how, load_how);
            if (whole < num_bytes)
                state = last_of(state, piece + whole, place == NULL ? NULL : place + whole, num_bytes - whole);
            row_bytes += num_bytes;
        }
        digests[row] = digest_of(state, row_bytes);
    }
    _mm_sfence();
}

#else

int handoff_is_supported(void) { return 0; }

void handoff_copy_rows(const uint8_t *source, ptrdiff_t source_stride, uint8_t *target, ptrdiff_t target_stride,
                       size_t num_rows, const int64_t *moves, size_t num_moves, int store_past, int load_past,
                       uint64_t *digests) {
    (void)source, (void)source_stride, (void)target, (void)target_stride;
    (void)num_rows, (void)moves, (void)num_moves, (void)store_past, (void)load_past, (void)digests;
}

#endif
