// The merges that SentencePiece's scores imply.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// A set of texts, by a hash that is known for each end of a text whose starts are hashed.
class Texts {
  public:
    Texts(const char* text, const int64_t* ends, int64_t count) : text(text), ends(ends) {
        while (mask < 4 * (uint64_t)count) mask = 2 * mask + 1;
        table.assign(mask + 1, -1);
        for (int64_t i = 0; i < count; i++) {
            uint64_t hash = 0;
            for (int64_t at = start(i); at < ends[i]; at++) hash = next(hash, text[at]);
            uint64_t slot = hash >> 16 & mask;
            while (table[slot] >= 0) slot = (slot + 1) & mask;
            table[slot] = i;
        }
    }

    static uint64_t next(uint64_t hash, char byte) { return hash * BASE + (uint8_t)byte + 1; }

    // Of what stands behind `before`, with BASE to the power of its bytes.
    static uint64_t behind(uint64_t whole, uint64_t before, uint64_t power) {
        return whole - before * power;
    }

    bool has(uint64_t hash, const char* from, int64_t bytes) const {
        for (uint64_t slot = hash >> 16 & mask; table[slot] >= 0; slot = (slot + 1) & mask) {
            int64_t at = start(table[slot]);
            if (ends[table[slot]] - at == bytes && !memcmp(text + at, from, bytes)) return true;
        }
        return false;
    }

    int64_t start(int64_t i) const { return i ? ends[i - 1] : 0; }

    static constexpr uint64_t BASE = 0x9e3779b97f4a7c15;

  private:
    const char* text;
    const int64_t* ends;
    uint64_t mask = 1;
    std::vector<int32_t> table;
};

// Finds every cut of a piece into two texts, and writes the number of the piece and the characters
// before the cut: the best score first, then the longest left part.
//
// `text` is UTF-8 of `count` texts up to their `ends`, of which the first `pieces` are cut.
int64_t find_merges(const char* text, const int64_t* ends, const double* scores, int64_t pieces,
                    int64_t count, int32_t* piece, int32_t* cut) {
    struct Merge {
        double score;
        int32_t piece, left, right;
    };
    Texts known(text, ends, count);
    std::vector<Merge> found;
    std::vector<uint64_t> hashes, powers{1};
    for (int64_t i = 0; i < pieces; i++) {
        const char* from = text + known.start(i);
        int64_t bytes = ends[i] - known.start(i);
        auto begins = [&](int64_t byte) { return ((uint8_t)from[byte] & 0xc0) != 0x80; };
        int32_t characters = 0, left = 0;
        hashes.assign(1, 0);
        for (int64_t byte = 0; byte < bytes; byte++) {
            characters += begins(byte);
            hashes.push_back(Texts::next(hashes[byte], from[byte]));
        }
        while ((int64_t)powers.size() <= bytes) powers.push_back(powers.back() * Texts::BASE);
        for (int64_t byte = 1; byte < bytes; byte++) {
            if (!begins(byte)) continue;
            left++;
            uint64_t rest = Texts::behind(hashes[bytes], hashes[byte], powers[bytes - byte]);
            if (known.has(hashes[byte], from, byte) && known.has(rest, from + byte, bytes - byte))
                found.push_back({scores[i], (int32_t)i, left, characters - left});
        }
    }
    std::stable_sort(found.begin(), found.end(), [](const Merge& a, const Merge& b) {
        if (a.score != b.score) return a.score > b.score;
        return a.left != b.left ? a.left > b.left : a.right > b.right;
    });
    for (size_t i = 0; i < found.size(); i++) piece[i] = found[i].piece, cut[i] = found[i].left;
    return found.size();
}

}  // namespace
