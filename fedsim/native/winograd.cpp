// Winograd's convolution with tiles of 6 x 6 (Lavin & Gray, CVPR 2016), one thread. A filter g of R x R over a tile d of
// the image gives M x M outputs, M = 7 - R,
//
//     A^T [ (G g G^T) * (B^T d B) ] A
//
// summed over channels, which is a matrix product for each of the 36 places of a tile: 36 multiplications where the
// plain sum takes (M R)^2, 144 or 100. The gradients are the same with the matrices transposed.
//
// Images and filters have channels last, [n][h][w][c]; what becomes of tiles lies place by place, [36][tiles][c].

template <int ROWS, int COLUMNS> struct Matrix {
    static constexpr int rows = ROWS, columns = COLUMNS;
    double at[ROWS][COLUMNS];
};

// Of the six points 0, 1, -1, 2, -2 and infinity.
constexpr double POINT[5] = {0, 1, -1, 2, -2}, SCALE[5] = {1 / 4., -1 / 6., -1 / 6., 1 / 24., 1 / 24.};
constexpr Matrix<6, 6> B_T = {{{4, 0, -5, 0, 1, 0},
                               {0, -4, -4, 1, 1, 0},
                               {0, 4, -4, -1, 1, 0},
                               {0, -2, -1, 2, 1, 0},
                               {0, 2, -1, -2, 1, 0},
                               {0, 4, 0, -5, 0, 1}}};

template <int N> constexpr Matrix<6, N> powers(bool scaled) {
    Matrix<6, N> m{};
    for (int i = 0; i < 5; i++) {
        double power = scaled ? SCALE[i] : 1;
        for (int j = 0; j < N; j++, power *= POINT[i]) m.at[i][j] = power;
    }
    m.at[5][N - 1] = 1;
    return m;
}

template <int ROWS, int COLUMNS> constexpr Matrix<COLUMNS, ROWS> transposed(const Matrix<ROWS, COLUMNS>& m) {
    Matrix<COLUMNS, ROWS> t{};
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < COLUMNS; j++) t.at[j][i] = m.at[i][j];
    return t;
}

struct Inputs { static constexpr auto m = B_T; };
template <int R> struct Filters { static constexpr auto m = powers<R>(true); };                  // G
template <int R> struct Outputs { static constexpr auto m = transposed(powers<7 - R>(false)); };  // A^T
template <class Of> struct Gradient { static constexpr auto m = transposed(Of::m); };

// y = m x m^T, where the cells of a tile are vectors of channels. All loops are unrolled, zeros left out.
template <class Of, class T, class V, int OUT = Of::m.rows, int IN = Of::m.columns>
inline __attribute__((always_inline)) void both_sides(const V (&x)[IN][IN], V (&y)[OUT][OUT]) {
    V half[OUT][IN];
#pragma GCC unroll 6
    for (int i = 0; i < OUT; i++)
#pragma GCC unroll 6
        for (int j = 0; j < IN; j++) {
            half[i][j] = V{};
#pragma GCC unroll 6
            for (int k = 0; k < IN; k++)
                if (Of::m.at[i][k] != 0) half[i][j] += x[k][j] * T(Of::m.at[i][k]);
        }
#pragma GCC unroll 6
    for (int i = 0; i < OUT; i++)
#pragma GCC unroll 6
        for (int j = 0; j < OUT; j++) {
            y[i][j] = V{};
#pragma GCC unroll 6
            for (int k = 0; k < IN; k++)
                if (Of::m.at[j][k] != 0) y[i][j] += half[i][k] * T(Of::m.at[j][k]);
        }
}

// `cell(vector, q)` for all channels from q on, in vectors as wide as they come.
template <class T, class Cell> void over_channels(int64_t c, Cell cell) {
    int64_t q = 0;
    for (; q + Vector<T>::size <= c; q += Vector<T>::size) cell(typename Vector<T>::type{}, q);
    for (; q + Vector<T, 16>::size <= c; q += Vector<T, 16>::size) cell(typename Vector<T, 16>::type{}, q);
    for (; q < c; q++) cell(T{}, q);
}

// Images and the tiles that cover them: the first begins `top` above and `left` of its image, the others `step` apart.
template <class T> struct Images {
    T* data;
    int64_t n, h, w, c, top, left, high, wide, step;
};

// Some of their tiles after a transform.
template <class T> struct Tiles {
    T* data;
    int64_t first, count, place, width;  // the places lie so far apart, a tile's channels within a place so far
    T* at(int p) const { return data + p * place; }
};

// Where a tile begins, and whether all of it lies within its image.
struct Corner {
    int64_t n, y, x;
    bool inside;
    template <class T>
    Corner(const Images<T>& s, int64_t tile, int size)
        : n(tile / (s.high * s.wide)), y(tile / s.wide % s.high * s.step - s.top), x(tile % s.wide * s.step - s.left),
          inside(y >= 0 && x >= 0 && y + size <= s.h && x + size <= s.w) {}
    template <class T> bool there(const Images<T>& s, int i, int j) const {
        return inside || (y + i >= 0 && y + i < s.h && x + j >= 0 && x + j < s.w);
    }
    template <class T> T* pixel(const Images<T>& s, int i, int j) const {
        return s.data + ((n * s.h + y + i) * s.w + x + j) * s.c;
    }
};

// m d m^T of the tiles d of the images; around these there are zeros.
template <class Of, class T> void take(const Images<const T>& images, const Tiles<T>& tiles) {
    constexpr int OUT = Of::m.rows, IN = Of::m.columns;
    for (int64_t tile = 0; tile < tiles.count; tile++) {
        const Corner at(images, tiles.first + tile, IN);
        over_channels<T>(images.c, [&](auto zero, int64_t q) {
            using V = decltype(zero);
            V from[IN][IN], to[OUT][OUT];
            for (int i = 0; i < IN; i++)
                for (int j = 0; j < IN; j++)
                    from[i][j] = at.there(images, i, j) ? *(const V*)(at.pixel(images, i, j) + q) : zero;
            both_sides<Of, T>(from, to);
            for (int i = 0; i < OUT; i++)
                for (int j = 0; j < OUT; j++) *(V*)(tiles.at(i * OUT + j) + tile * tiles.width + q) = to[i][j];
        });
    }
}

// m t m^T of what lies in the places, as tiles of the images: added to them (ADD), or stored, where no two overlap.
template <class Of, class T, bool ADD = false> void give(const Tiles<T>& tiles, const Images<T>& images) {
    constexpr int OUT = Of::m.rows, IN = Of::m.columns;
    for (int64_t tile = 0; tile < tiles.count; tile++) {
        const Corner at(images, tiles.first + tile, OUT);
        over_channels<T>(images.c, [&](auto zero, int64_t q) {
            using V = decltype(zero);
            V from[IN][IN], to[OUT][OUT];
            for (int i = 0; i < IN; i++)
                for (int j = 0; j < IN; j++) from[i][j] = *(const V*)(tiles.at(i * IN + j) + tile * tiles.width + q);
            both_sides<Of, T>(from, to);
            for (int i = 0; i < OUT; i++)
                for (int j = 0; j < OUT; j++)
                    if (at.there(images, i, j)) {
                        V* pixel = (V*)(at.pixel(images, i, j) + q);
                        *pixel = ADD ? *pixel + to[i][j] : to[i][j];
                    }
        });
    }
}

// Memory that is kept from call to call: what was in it is still in the cache.
template <class T> struct Room {
    std::vector<T> memory;
    Tiles<T> tiles(int64_t count, int64_t channels) {
        // A vector between the places: a whole number of pages apart they would push each other out of the cache.
        const int64_t width = padded<T>(channels), place = count * width + Vector<T>::size;
        if (int64_t(memory.size()) < 36 * place) memory.assign(36 * place, 0);
        return {memory.data(), 0, count, place, width};
    }
};

constexpr int64_t AT_ONCE = 1 << 19;  // bytes of tiles, so that they are still in the cache when they are used

template <int R, class T> struct Convolution {
    static constexpr int M = 7 - R;
    int64_t n, h, w, c, k, top, left;
    int64_t rows() const { return h + 2 * top - R + 1; }
    int64_t columns() const { return w + 2 * left - R + 1; }
    int64_t high() const { return (rows() + M - 1) / M; }
    int64_t wide() const { return (columns() + M - 1) / M; }
    int64_t tiles() const { return n * high() * wide(); }
    int64_t at_once() const {
        const int64_t some = AT_ONCE / (36 * (c + k) * sizeof(T)) / ROWS * ROWS;
        return some < ROWS ? ROWS : some < tiles() ? some : tiles();
    }
    template <class U> Images<U> inputs(U* x) const { return {x, n, h, w, c, top, left, high(), wide(), M}; }
    template <class U> Images<U> outputs(U* y) const { return {y, n, rows(), columns(), k, 0, 0, high(), wide(), M}; }
    // Filters are images of a single tile.
    template <class U> static Images<U> filters(U* f, int64_t n, int64_t c) { return {f, n, R, R, c, 0, 0, 1, 1, 6}; }

    void operator()(const T* x, const T* f, T* y) const {
        static thread_local Room<T> for_u, for_v, for_m;
        static thread_local std::vector<T> turned;
        turned.resize(k * R * R * c);
        for (int64_t p = 0; p < R * R; p++)
            for (int64_t i = 0; i < k; i++)
                for (int64_t j = 0; j < c; j++) turned[(j * R * R + p) * k + i] = f[(i * R * R + p) * c + j];
        const Tiles<T> u = for_u.tiles(c, k);
        take<Filters<R>>(filters<const T>(turned.data(), c, k), u);
        Tiles<T> v = for_v.tiles(at_once(), c), m = for_m.tiles(at_once(), k);
        for (v.first = m.first = 0; v.first < tiles(); v.first = m.first += at_once()) {
            v.count = m.count = std::min(at_once(), tiles() - v.first);
            take<Inputs>(inputs(x), v);
            for (int p = 0; p < 36; p++)
                product<T, false>(v.count, c, u.width, v.at(p), v.width, u.at(p), u.width, m.at(p), m.width, false);
            give<Outputs<R>>(m, outputs(y));
        }
    }

    void gradients(const T* of_y, const T* x, const T* f, T* of_x, T* of_f) const {
        static thread_local Room<T> for_u, for_v, for_m, for_of_u;
        const Tiles<T> u = for_u.tiles(k, c), of_u = for_of_u.tiles(k, c);
        take<Filters<R>>(filters(f, k, c), u);
        Tiles<T> v = for_v.tiles(at_once(), c), of_m = for_m.tiles(at_once(), k);
        std::fill_n(of_x, n * h * w * c, 0);
        for (v.first = of_m.first = 0; v.first < tiles(); v.first = of_m.first += at_once()) {
            v.count = of_m.count = std::min(at_once(), tiles() - v.first);
            take<Gradient<Outputs<R>>>(outputs(of_y), of_m);
            take<Inputs>(inputs(x), v);
            for (int p = 0; p < 36; p++) {
                product<T, true>(k, v.count, v.width, of_m.at(p), of_m.width, v.at(p), v.width, of_u.at(p), of_u.width, v.first);
                product<T, false>(v.count, k, u.width, of_m.at(p), of_m.width, u.at(p), u.width, v.at(p), v.width, false);
            }
            give<Gradient<Inputs>, T, true>(v, inputs(of_x));
        }
        give<Gradient<Filters<R>>>(of_u, filters(of_f, k, c));
    }
};

#define EXPORT(R, T)                                                                                                \
    extern "C" {                                                                                                   \
    void convolution(const T* x, const T* f, T* y, const Convolution<R, T>& sizes) { sizes(x, f, y); }             \
    void gradients(const T* of_y, const T* x, const T* f, T* of_x, T* of_f, const Convolution<R, T>& sizes) {      \
        sizes.gradients(of_y, x, f, of_x, of_f);                                                                   \
    }                                                                                                              \
    }
