/* compressor IN OUT: the portable compressor as a program, to be built for another processor.
 *
 * It reads IN, is primed with its first 100 bytes, writes the coded bytes to OUT and decodes them again.
 * Exit status 0: they decode to what they were made from. */
#include "../src/elman/compression/api.h"
#include <cstdio>
#include <vector>

extern "C" {
void *elman_compressor_make(const Options *, const float *, int);
void elman_compressor_prime(void *, int, const uint8_t *, int64_t);
int64_t elman_compressor_encode(void *, int, const uint8_t *, int64_t, uint8_t *, int64_t, int);
int64_t elman_compressor_decode(void *, int, const uint8_t *, int64_t, int64_t *, uint8_t *, int64_t, int);
}

static void *primed(const std::vector<uint8_t> &text) {
    const Options options = {int64_t(text.size()), 24, 10, 16, 5, 3, 0.01, 0.004, 0.002};
    void *coder = elman_compressor_make(&options, nullptr, 0);
    if (coder) elman_compressor_prime(coder, 0, text.data(), 100);
    return coder;
}

int main(int, char **names) {
    FILE *in = fopen(names[1], "rb"), *out = fopen(names[2], "wb");
    if (!in || !out) return 2;
    std::vector<uint8_t> text(1 << 16);
    text.resize(fread(text.data(), 1, text.size(), in));
    std::vector<uint8_t> coded(64 * (text.size() + 2)), again(text.size());
    void *coder = primed(text), *decoder = primed(text);
    if (!coder || !decoder) return 3;
    const int64_t n = elman_compressor_encode(coder, 0, text.data(), int64_t(text.size()), coded.data(),
                                              int64_t(coded.size()), 1);
    int64_t used = 0;
    elman_compressor_decode(decoder, 0, coded.data(), n, &used, again.data(), int64_t(again.size()), 1);
    fwrite(coded.data(), 1, size_t(n), out);
    return fclose(out) == 0 && again == text ? 0 : 1;
}
