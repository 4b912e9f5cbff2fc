// A layer of long short-term memory:
//
//     i, f, g, o = W x_t + R h_{t-1} + b          (i, f, o through the sigmoid, g through tanh)
//     c_t = f c_{t-1} + i g ,  h_t = o tanh(c_t)
//
// and its way back. A batch has few rows: what a product takes is decided by how its matrices come out of the cache, so
// each is laid out once in the order in which it is gone through.
//
// Tensors have the batch first, [n][time][...]; `gates` has room between its rows.
//
// Threads, where there are several, have some of the rows each and, of the weights' gradients, some of the gates: a
// number is the same whoever computes it.

#include <cstring>
#include <thread>

// e^x - 1 without loss near 0, as 2^n (e^r - 1) + (2^n - 1) with x = n log 2 + r. V is a vector of T.
template <class T> struct Bits;
template <> struct Bits<float> {
    typedef int32_t type;
    static constexpr int mantissa = 23, bias = 127, terms = 7;
    static constexpr float largest = 80, low_log2 = -2.12194440e-4f, high_log2 = 0.693359375f;
};
template <> struct Bits<double> {
    typedef int64_t type;
    static constexpr int mantissa = 52, bias = 1023, terms = 13;
    static constexpr double largest = 700, low_log2 = -2.12194440054690583e-4, high_log2 = 0.693359375;
};
template <class T, class V> struct Integers {
    typedef typename Bits<T>::type type __attribute__((vector_size(sizeof(V)), aligned(sizeof(T)), may_alias));
};

template <class T, class V> inline V minus_one(V x) {
    typedef Bits<T> B;
    typedef typename Integers<T, V>::type I;
    const V most = V{} + B::largest;
    x = x > most ? most : x < -most ? -most : x;
    constexpr T shift = T(3) * (typename B::type(1) << (B::mantissa - 1));  // what is added to it loses its fraction
    const V shifted = x * T(1.4426950408889634) + shift, n = shifted - shift;
    const V r = (x - n * B::high_log2) - n * B::low_log2;
    V sum = V{};
    T factorial = 1;
#pragma GCC unroll 16
    for (int k = 2; k <= B::terms; k++) factorial *= k;
#pragma GCC unroll 16
    for (int k = B::terms; k >= 1; factorial /= k--) sum = (sum + 1 / factorial) * r;
    const V power = (V)(((I)shifted + B::bias) << B::mantissa);
    return power * sum + (power - 1);
}
template <class T, class V> inline V sigmoid(V x) { return 1 / (2 + minus_one<T, V>(-x)); }
template <class T, class V> inline V tanh_of(V x) {
    const V e = minus_one<T, V>(x + x);
    return e / (e + 2);
}

// Memory that is kept from call to call: to be given new pages takes longer than to fill them.
template <class T> T* room(std::vector<T>& kept, int64_t numbers) {
    if (int64_t(kept.size()) < numbers) kept.resize(numbers);
    return kept.data();
}

// b of a product, two vectors of columns beside each other, and one row below the other as they are read.
// `fill(k, first, count, to)` gives some numbers of row k.
template <class T> struct Packed {
    static constexpr int64_t size = Vector<T>::size, CACHED = (1 << 18) / sizeof(T);
    int64_t depth, columns;
    const T* memory;
    template <class Fill>
    Packed(std::vector<T>& kept, int64_t depth, int64_t columns, Fill fill)
        : depth(depth), columns(padded<T>(columns)), memory(room(kept, depth * this->columns)) {
        T* to = kept.data();
        for (int64_t first = 0; first < columns; first += 2 * size) {
            const int64_t wide = std::min(2 * size, this->columns - first), there = std::min(wide, columns - first);
            for (int64_t k = 0; k < depth; k++, to += wide) fill(k, first, there, to);
        }
    }
    // c = a b, where c has room for whole vectors.
    template <bool ACROSS = false> void times(int64_t rows, const T* a, int64_t lda, T* c, int64_t ldc) const {
        if constexpr (!ACROSS) {  // as many rows as the cache holds beside two vectors of columns
            const int64_t some = std::max(CACHED / (depth * ROWS), int64_t(1)) * ROWS;
            for (; rows > some; rows -= some, a += some * lda, c += some * ldc) times(some, a, lda, c, ldc);
        }
        const T* b = memory;
        for (int64_t left = columns; left > 0; left -= 2 * size, b += 2 * size * depth, c += 2 * size)
            if (left > size) blocks<T, 2, ACROSS>(rows, a, lda, b, 2 * size, c, ldc, depth, false);
            else blocks<T, 1, ACROSS>(rows, a, lda, b, size, c, ldc, depth, false);
    }
    // c has no more than its columns.
    template <bool ACROSS> void exactly(int64_t rows, const T* a, int64_t lda, T* c, int64_t wide) const {
        if (wide == columns) return times<ACROSS>(rows, a, lda, c, wide);
        static thread_local std::vector<T> kept;
        T* whole = room(kept, rows * columns);
        times<ACROSS>(rows, a, lda, whole, columns);
        for (int64_t i = 0; i < rows; i++) std::copy_n(whole + i * columns, wide, c + i * wide);
    }
};

// Rows with room for whole vectors, and one between them: whole pages apart they push each other out of the cache.
template <class T> struct Rows {
    int64_t width;
    T* memory;
    Rows(std::vector<T>& kept, int64_t n, int64_t columns)
        : width(padded<T>(columns) + Vector<T>::size), memory(room(kept, n * width)) {}
    T* operator[](int64_t row) const { return memory + row * width; }
};

// Fills with a matrix of so many columns as it is, or transposed.
template <class T> auto rows_of(const T* m, int64_t columns) {
    return [=](int64_t k, int64_t first, int64_t count, T* to) { std::copy_n(m + k * columns + first, count, to); };
}
template <class T> auto columns_of(const T* m, int64_t columns) {
    return [=](int64_t k, int64_t first, int64_t count, T* to) {
        for (int64_t j = 0; j < count; j++) to[j] = m[(first + j) * columns + k];
    };
}

// work(first, last) of [0, count), shared out to threads in multiples of `least`.
template <class Work> void share(int64_t threads, int64_t count, int64_t least, Work work) {
    const int64_t pieces = (count + least - 1) / least, members = std::max(std::min(threads, pieces), int64_t(1));
    auto border = [=](int64_t j) { return std::min(j * pieces / members * least, count); };
    std::vector<std::thread> others;
    for (int64_t j = 1; j < members; j++) others.emplace_back(work, border(j), border(j + 1));
    work(border(0), border(1));
    for (auto& other : others) other.join();
}

template <class T> struct Lstm {
    typedef typename Vector<T>::type V;
    static constexpr int64_t size = Vector<T>::size, GROUP = 8 * ROWS;
    int64_t n, time, inputs, hidden, width;  // of a row of `gates`
    int64_t threads;                         // at most

    // cell(row, first, count) of some rows, for as many of their columns as a vector holds.
    template <class Cell> void each(int64_t begin, int64_t end, Cell cell) const {
        for (int64_t i = begin; i < end; i++)
            for (int64_t q = 0; q < hidden; q += size) cell(i, q, std::min(size, hidden - q));
    }
    static V load(const T* from, int64_t count) {
        V v{};
        if (count == size) v = *(const V*)from;
        else std::memcpy(&v, from, count * sizeof(T));
        return v;
    }
    static void store(T* to, V v, int64_t count) {
        if (count == size) *(V*)to = v;
        else std::memcpy(to, &v, count * sizeof(T));
    }

    void forward(const T* x, const T* w, const T* r, const T* bias, T* h, T* c, T* gates) const {
        static thread_local std::vector<T> for_w, for_r, for_before, for_sums;
        const Packed<T> input(for_w, inputs, 4 * hidden, columns_of(w, inputs));
        const Packed<T> recurrent(for_r, hidden, 4 * hidden, columns_of(r, hidden));
        const Rows<T> before(for_before, n, hidden), sums(for_sums, n, 4 * hidden);
        std::fill_n(sums[0], n * sums.width, 0);
        share(threads, n, 1, [&](int64_t first, int64_t last) {
            const int64_t begin = first * time, count = last - first;
            input.times(count * time, x + begin * inputs, inputs, gates + begin * width, width);
            for (int64_t t = 0; t < time; t++) {
                if (t) recurrent.times(count, before[first], before.width, sums[first], sums.width);
                each(first, last, [&](int64_t i, int64_t q, int64_t count) {
                    const int64_t at = (i * time + t) * hidden + q;
                    T* gate = gates + (i * time + t) * width + q;
                    V z[4];
                    for (int64_t k = 0; k < 4; k++) {
                        const int64_t column = k * hidden + q;
                        z[k] = load(gate + k * hidden, count) + *(V*)(sums[i] + column) + load(bias + column, count);
                        z[k] = k == 2 ? tanh_of<T, V>(z[k]) : sigmoid<T, V>(z[k]);
                        store(gate + k * hidden, z[k], count);
                    }
                    const V old = t ? load(c + at - hidden, count) : V{}, now = z[1] * old + z[0] * z[2];
                    const V out = z[3] * tanh_of<T, V>(now);
                    store(c + at, now, count);
                    store(h + at, out, count);
                    store(before[i] + q, out, count);
                });
            }
        });
    }

    void backward(const T* of_h, const T* x, const T* h, const T* c, const T* gates, const T* w, const T* r, T* of_x,
                  T* of_w, T* of_r, T* of_bias) const {
        static thread_local std::vector<T> for_r, for_next, for_c, for_gates, for_w, for_x, for_h;
        const Packed<T> recurrent(for_r, 4 * hidden, hidden, rows_of(r, hidden));
        const Packed<T> input(for_w, 4 * hidden, inputs, rows_of(w, inputs));
        const Rows<T> of_next(for_next, n, hidden), of_c(for_c, n, hidden);
        const Rows<T> of_gates(for_gates, n * time, 4 * hidden);
        for (auto& rows : {of_next, of_c}) std::fill_n(rows[0], n * rows.width, 0);
        share(threads, n, 1, [&](int64_t first, int64_t last) {
            const int64_t begin = first * time, wide = of_gates.width;
            for (int64_t t = time - 1; t >= 0; t--) {
                each(first, last, [&](int64_t i, int64_t q, int64_t count) {
                    const int64_t row = i * time + t, at = row * hidden + q;
                    V gate[4], of[4];
                    for (int64_t k = 0; k < 4; k++) gate[k] = load(gates + row * width + k * hidden + q, count);
                    const V old = t ? load(c + at - hidden, count) : V{}, out = tanh_of<T, V>(load(c + at, count));
                    const V up = load(of_h + at, count) + *(V*)(of_next[i] + q);
                    const V back = *(V*)(of_c[i] + q) + up * gate[3] * (1 - out * out);
                    of[0] = back * gate[2] * gate[0] * (1 - gate[0]);
                    of[1] = back * old * gate[1] * (1 - gate[1]);
                    of[2] = back * gate[0] * (1 - gate[2] * gate[2]);
                    of[3] = up * out * gate[3] * (1 - gate[3]);
                    *(V*)(of_c[i] + q) = back * gate[1];
                    for (int64_t k = 0; k < 4; k++) store(of_gates[row] + k * hidden + q, of[k], count);
                });
                if (t) recurrent.times(last - first, of_gates[begin + t], time * wide, of_next[first], of_next.width);
            }
            input.template exactly<false>((last - first) * time, of_gates[begin], wide, of_x + begin * inputs, inputs);
        });

        // Of the weights: products over all moments of all rows, some gates at a time.
        const Packed<T> by_x(for_x, n * time, inputs, rows_of(x, inputs));
        const Packed<T> by_h(for_h, n * time, hidden, [&](int64_t k, int64_t first, int64_t count, T* to) {
            if (k % time) std::copy_n(h + (k - 1) * hidden + first, count, to);
            else std::fill_n(to, count, 0);
        });
        share(threads, 4 * hidden, GROUP, [&](int64_t begin, int64_t end) {
            static thread_local std::vector<T> for_group;
            for (int64_t first = begin; first < end; first += GROUP) {
                const int64_t gates = std::min(GROUP, end - first);
                T *group = room(for_group, GROUP * n * time), sum[GROUP] = {};
                for (int64_t k = 0; k < n * time; k++, group += GROUP) {
                    std::copy_n(of_gates[k] + first, gates, group);
                    for (int64_t i = 0; i < gates; i++) sum[i] += group[i];
                }
                std::copy_n(sum, gates, of_bias + first);
                by_x.template exactly<true>(gates, for_group.data(), GROUP, of_w + first * inputs, inputs);
                by_h.template exactly<true>(gates, for_group.data(), GROUP, of_r + first * hidden, hidden);
            }
        });
    }
};

#define EXPORT(T)                                                                                                   \
    extern "C" {                                                                                                   \
    void forward(const T* x, const T* w, const T* r, const T* b, T* h, T* c, T* gates, const Lstm<T>& sizes) {     \
        sizes.forward(x, w, r, b, h, c, gates);                                                                    \
    }                                                                                                              \
    void backward(const T* of_h, const T* x, const T* h, const T* c, const T* gates, const T* w, const T* r,       \
                  T* of_x, T* of_w, T* of_r, T* of_b, const Lstm<T>& sizes) {                                      \
        sizes.backward(of_h, x, h, c, gates, w, r, of_x, of_w, of_r, of_b);                                        \
    }                                                                                                              \
    }
