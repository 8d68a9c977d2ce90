/* Copies to memory that nobody reads soon. */
#ifndef ALLRANKS_COPIES_H
#define ALLRANKS_COPIES_H

#include <stdint.h>
#include <string.h>

#ifdef __SSE2__ /* of every x86-64; other processors copy as always */
#include <emmintrin.h>

/* A line that is stored whole need not be read first, nor take the place of one that is needed. */
static inline void copy_past_caches(char *to, const char *from, size_t bytes)
{
    size_t head = -(uintptr_t)to & 63;
    head = head < bytes ? head : bytes;
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, bytes);
}

/* A release does not order these stores. */
static inline void order_copies(void) { _mm_sfence(); }
#else
static inline void copy_past_caches(char *to, const char *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static inline void order_copies(void) {}
#endif

#endif
