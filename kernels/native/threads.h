// A pool of threads whose caller never waits for a thread that is not scheduled.

#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// The first of `count` parts that range number `i` of `ranges` has.
inline int64_t bound(int64_t count, int ranges, int i) { return count * i / ranges; }

// What is read after a job: parts of `size` bytes each, in a range for each of so many threads.
struct Upcoming {
    const char* data = nullptr;
    int64_t count = 0, size = 0;
    int threads = 1;
};

// Asks for a thread's range of what is upcoming, as much of it as an L2 cache easily holds.
class Prefetch {
  public:
    void start(const Upcoming& next, int own) {
        if (next.data == data) return;  // it goes on where it was
        data = at = end = next.data;
        if (own >= next.threads) return;
        at += bound(next.count, next.threads, own) * next.size;
        end += bound(next.count, next.threads, own + 1) * next.size;
        end = std::min(end, at + MOST);
    }

    // Asks for a little more; false if there is none.
    bool more() {
        if (at >= end) return false;
        for (const char* stop = at + 512; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
        return true;
    }

  private:
    static constexpr int64_t MOST = 256 << 10;
    const char *data = nullptr, *at = nullptr, *end = nullptr;
};

// The parts 0 to count - 1 of what is to be done. Each is in one of the ranges: a thread takes those of
// its own from the front, so that it reads on where it was, then the back half of another's. If there
// is one range for all, each takes what is next.
struct Job {
    void (*part)(const void* of, int64_t i) = nullptr;
    const void* of = nullptr;
    int64_t count = 0;
    int threads = 1, ranges = 1;
    Upcoming next;
};

// Threads that help the caller of `run`. The caller works too, and waits only for helpers that have
// taken a part: a helper without a processor delays nothing, whereas the end of an OpenMP region
// waits for all. After a job, helpers spin for a while, as the next one is likely to come, then
// sleep; a thread that waits prefetches what the next job reads. A second caller works alone
// meanwhile.
class Pool {
  public:
    // If a thread runs out of memory, the caller's throws.
    void run(const Job& next) {
        std::unique_lock<std::mutex> alone(running, std::try_to_lock);
        if (!alone) {
            for (int64_t i = 0; i < next.count; i++) next.part(next.of, i);
            return;
        }
        if ((int)ranges.size() < next.ranges) ranges = std::vector<Range>(next.ranges);
        try {
            for (; started < next.threads - 1; started++)
                std::thread(&Pool::help, this, started + 1).detach();
        } catch (const std::system_error&) {  // the system starts no more threads: fewer do the work
        }
        job = next, failed = false;
        for (int i = 0; i < job.ranges; i++)
            ranges[i].left = span(bound(job.count, job.ranges, i),
                                  bound(job.count, job.ranges, i + 1));
        inside.fetch_add(OPEN);
        jobs.fetch_add(1);
        if (asleep.load() > 0) {
            { std::lock_guard<std::mutex> guard(sleeping); }
            wake.notify_all();
        }
        work(0);
        inside.fetch_sub(OPEN);
        Prefetch upcoming;
        upcoming.start(job.next, 0);
        for (int spins = 0; inside.load() > 0; spins++)
            if (upcoming.more()) continue;
            else if (spins < 1000) pause();
            else std::this_thread::yield();
        if (failed) throw std::bad_alloc();
    }

  private:
    static constexpr int OPEN = 1 << 20;      // in `inside`, while a job may be joined
    static constexpr int MOST_SPINS = 20000;  // some tenths of a millisecond

    struct alignas(64) Range {
        std::atomic<uint64_t> left{0};  // its first part, and above that the end of its last
    };

    std::mutex running, sleeping;
    std::condition_variable wake;
    int started = 0;
    Job job;  // like the ranges it changes only while no thread is inside
    std::vector<Range> ranges;
    std::atomic<bool> failed{false};
    alignas(64) std::atomic<uint64_t> jobs{0};
    alignas(64) std::atomic<int> inside{0};
    std::atomic<int> asleep{0};

    static uint64_t span(int64_t front, int64_t back) { return (uint64_t)back << 32 | front; }
    static int64_t front(uint64_t span) { return span & UINT32_MAX; }
    static int64_t back(uint64_t span) { return span >> 32; }

    void work(int own) try {
        std::atomic<uint64_t>& mine = ranges[own % job.ranges].left;
        do {
            for (uint64_t left = mine.load(); front(left) < back(left);) {
                if (!mine.compare_exchange_weak(left, span(front(left) + 1, back(left)))) continue;
                job.part(job.of, front(left));
                left = mine.load();
            }
        } while (job.ranges > 1 && steal(own));
    } catch (const std::bad_alloc&) {
        failed = true;
    }

    // Makes the back half of another's range one's own, which is empty; false if all are.
    bool steal(int own) {
        for (int i = 1; i < job.ranges; i++) {
            std::atomic<uint64_t>& other = ranges[(own + i) % job.ranges].left;
            for (uint64_t left = other.load(); front(left) < back(left);) {
                int64_t middle = (front(left) + back(left)) / 2;
                if (!other.compare_exchange_weak(left, span(front(left), middle))) continue;
                ranges[own].left = span(middle, back(left));
                return true;
            }
        }
        return false;
    }

    // Thread number `own` of those that work; the caller is number 0.
    void help(int own) {
        Prefetch upcoming;
        for (uint64_t seen = 0;;) {
            for (int spins = 0; jobs.load() == seen; spins++) {
                if (upcoming.more()) continue;
                if (spins < MOST_SPINS) {
                    pause();
                    continue;
                }
                std::unique_lock<std::mutex> lock(sleeping);
                asleep.fetch_add(1);
                wake.wait(lock, [&] { return jobs.load() != seen; });
                asleep.fetch_sub(1);
            }
            seen = jobs.load();
            if (inside.fetch_add(1) >= OPEN && own < job.threads) {
                work(own);
                upcoming.start(job.next, own);
            }
            inside.fetch_sub(1);
        }
    }
};

alignas(Pool) char pool_memory[sizeof(Pool)];  // its threads never end, so neither does it

Pool& pool() {
    static Pool* made = [] {  // a forked child has none of its parent's threads
        pthread_atfork(nullptr, nullptr, [] { new (pool_memory) Pool; });
        return new (pool_memory) Pool;
    }();
    return *made;
}

// Calls f(0) ... f(count - 1), below 2^32; each thread takes the next number when it is free, or with
// `ranges` what is next in a range of its own. Threads without work prefetch what is read `next`.
template <class F>
void parallel(int64_t count, int threads, const F& f, bool ranges = false, Upcoming next = {}) {
    threads = std::min<int64_t>(threads, count);
    auto part = [](const void* of, int64_t i) { (*(const F*)of)(i); };
    if (threads > 1) return pool().run({part, &f, count, threads, ranges ? threads : 1, next});
    for (int64_t i = 0; i < count; i++) f(i);
}

// The same for rows; a few short ones stay on the caller's thread.
template <class F>
void parallel_rows(int64_t rows, int64_t width, int threads, const F& f) {
    int64_t step = std::max<int64_t>(1, (1 << 14) / std::max<int64_t>(1, width));
    parallel((rows + step - 1) / step, threads, [&](int64_t i) {
        for (int64_t row = i * step; row < std::min(rows, (i + 1) * step); row++) f(row);
    });
}

// A thread's memory for floats, which it keeps.
class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    ~Scratch() { free(data); }

    float* get(size_t floats) {
        if (floats > size) {
            free(data);
            size = 0;
            data = (float*)aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
            if (!data) throw std::bad_alloc();
            size = floats;
        }
        return data;
    }

  private:
    float* data = nullptr;
    size_t size = 0;
};

}  // namespace
