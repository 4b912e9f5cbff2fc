// Vectors of numbers, and products of small matrices made of them.

#include <algorithm>
#include <cstdint>
#include <vector>

#ifdef __AVX512F__
constexpr int WIDE = 64, ROWS = 10;  // bytes of a vector; rows of a product at a time, so that all sums stay in registers
#else
constexpr int WIDE = 32, ROWS = 6;
#endif

template <class T, int BYTES = WIDE> struct Vector {
    typedef T type __attribute__((vector_size(BYTES), aligned(sizeof(T)), may_alias));
    static constexpr int64_t size = BYTES / sizeof(T);
};

template <class T> constexpr int64_t padded(int64_t n) { return (n + Vector<T>::size - 1) / Vector<T>::size * Vector<T>::size; }

// c[R][VECTORS] = (c +) a[R][depth] b[depth][VECTORS]; ACROSS: a is given as [depth][R].
template <class T, int R, int VECTORS, bool ACROSS>
void block(const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t depth, bool add) {
    typedef typename Vector<T>::type V;
    constexpr int64_t size = Vector<T>::size;
    V sum[R][VECTORS];  // in registers, from the beginning to the end, as long as no loop over it is left
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) sum[i][v] = V{};
    for (int64_t k = 0; k < depth; k++) {
        V row[VECTORS];
        for (int v = 0; v < VECTORS; v++) row[v] = *(const V*)(b + k * ldb + v * size);
#pragma GCC unroll 16
        for (int i = 0; i < R; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[i][v] += row[v] * (ACROSS ? a[k * lda + i] : a[i * lda + k]);
    }
    if (add)
#pragma GCC unroll 16
        for (int i = 0; i < R; i++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) sum[i][v] += *(const V*)(c + i * ldc + v * size);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++)
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) *(V*)(c + i * ldc + v * size) = sum[i][v];
}

template <class T, int VECTORS, bool ACROSS, int R = ROWS>
void blocks(int64_t rows, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t depth, bool add) {
    for (; rows >= R; rows -= R, a += ACROSS ? R : R * lda, c += R * ldc)
        block<T, R, VECTORS, ACROSS>(a, lda, b, ldb, c, ldc, depth, add);
    if constexpr (R > 1)
        if (rows) blocks<T, VECTORS, ACROSS, R - 1>(rows, a, lda, b, ldb, c, ldc, depth, add);
}

// c[rows][columns] = (c +) a[rows][depth] b[depth][columns], for whole vectors of columns and a b that the cache holds.
template <class T, bool ACROSS>
void product(int64_t rows, int64_t depth, int64_t columns, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
             int64_t ldc, bool add) {
    constexpr int64_t size = Vector<T>::size;
    for (; columns >= 2 * size; columns -= 2 * size, b += 2 * size, c += 2 * size)
        blocks<T, 2, ACROSS>(rows, a, lda, b, ldb, c, ldc, depth, add);
    if (columns > 0) blocks<T, 1, ACROSS>(rows, a, lda, b, ldb, c, ldc, depth, add);
}
