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
            uint64_t slot = slot_of(hash);
            while (table[slot] >= 0) slot = (slot + 1) & mask;
            table[slot] = i;
        }
    }

    static uint64_t next(uint64_t hash, char byte) { return hash * BASE + (uint8_t)byte + 1; }

    // Of what stands behind `before`, with BASE to the power of its bytes.
    static uint64_t behind(uint64_t whole, uint64_t before, uint64_t power) {
        return whole - before * power;
    }

    // The number of a text; -1 if it is none of these.
    int32_t find(uint64_t hash, const char* from, int64_t bytes) const {
        uint64_t slot = slot_of(hash);
        for (; table[slot] >= 0; slot = (slot + 1) & mask) {
            int64_t at = start(table[slot]);
            if (ends[table[slot]] - at == bytes && !memcmp(text + at, from, bytes)) break;
        }
        return table[slot];
    }

    // The last byte of a text is in the lowest bits of its hash alone, so it is mixed into all.
    uint64_t slot_of(uint64_t hash) const { return (hash ^ hash >> 32) * BASE >> 32 & mask; }

    int64_t start(int64_t i) const { return i ? ends[i - 1] : 0; }

    static constexpr uint64_t BASE = 0x9e3779b97f4a7c15;

  private:
    const char* text;
    const int64_t* ends;
    uint64_t mask = 1;
    std::vector<int32_t> table;
};

bool begins(char byte) { return ((uint8_t)byte & 0xc0) != 0x80; }  // a character

// Finds every cut of a piece into two texts, and writes their numbers: the best score first, then
// the longest left part.
//
// `text` is UTF-8 of `count` texts of so many characters each, of which the first `pieces` are cut.
int64_t find_merges(const char* text, const int64_t* characters, const double* scores,
                    int64_t pieces, int64_t count, int32_t* left, int32_t* right) {
    struct Merge {
        double score;
        int32_t left, right, before, behind;  // numbers, then characters
    };
    std::vector<int64_t> ends(count);
    for (int64_t i = 0, at = 0; i < count; ends[i++] = at)
        for (int64_t left = characters[i]; left > 0; left--)
            do at++;
            while (!begins(text[at]));
    Texts known(text, ends.data(), count);
    std::vector<Merge> found;
    std::vector<uint64_t> hashes, powers{1};
    for (int64_t i = 0; i < pieces; i++) {
        const char* from = text + known.start(i);
        int64_t bytes = ends[i] - known.start(i);
        int32_t before = 0, all = characters[i];
        hashes.assign(1, 0);
        for (int64_t byte = 0; byte < bytes; byte++)
            hashes.push_back(Texts::next(hashes[byte], from[byte]));
        while ((int64_t)powers.size() <= bytes) powers.push_back(powers.back() * Texts::BASE);
        for (int64_t byte = 1; byte < bytes; byte++) {
            if (!begins(from[byte])) continue;
            before++;
            int32_t first = known.find(hashes[byte], from, byte);
            if (first < 0) continue;
            uint64_t rest = Texts::behind(hashes[bytes], hashes[byte], powers[bytes - byte]);
            int32_t second = known.find(rest, from + byte, bytes - byte);
            if (second >= 0) found.push_back({scores[i], first, second, before, all - before});
        }
    }
    std::stable_sort(found.begin(), found.end(), [](const Merge& a, const Merge& b) {
        if (a.score != b.score) return a.score > b.score;
        return a.before != b.before ? a.before > b.before : a.behind > b.behind;
    });
    for (size_t i = 0; i < found.size(); i++) left[i] = found[i].left, right[i] = found[i].right;
    return found.size();
}

}  // namespace
