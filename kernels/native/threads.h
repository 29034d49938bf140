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

// Threads that help the caller of `run`. The caller works too, and waits only for helpers that have
// taken a part: a helper without a processor delays nothing, whereas the end of an OpenMP region
// waits for all. After a job, helpers spin for a while, as the next one is likely to come, then
// sleep. A second caller works alone meanwhile.
class Pool {
  public:
    using Work = void (*)(void*);

    void run(Work work, void* data, int threads) {
        std::unique_lock<std::mutex> alone(running, std::try_to_lock);
        if (!alone) return work(data);
        try {
            while (started < threads - 1) std::thread(&Pool::help, this, started).detach(), started++;
        } catch (const std::system_error&) {  // the system starts no more threads: fewer do the work
        }
        this->work = work, this->data = data, wanted = threads - 1;
        inside.fetch_add(OPEN);
        job.fetch_add(1);
        if (asleep.load() > 0) {
            { std::lock_guard<std::mutex> guard(sleeping); }
            wake.notify_all();
        }
        work(data);
        inside.fetch_sub(OPEN);
        for (int spins = 0; inside.load() > 0; spins++)
            if (spins < 1000) pause();
            else std::this_thread::yield();
    }

  private:
    static constexpr int OPEN = 1 << 20;      // in `inside`, while a job may be joined
    static constexpr int MOST_SPINS = 20000;  // some tenths of a millisecond

    std::mutex running, sleeping;
    std::condition_variable wake;
    int started = 0;
    Work work = nullptr;
    void* data = nullptr;
    int wanted = 0;
    alignas(64) std::atomic<uint64_t> job{0};
    alignas(64) std::atomic<int> inside{0};
    std::atomic<int> asleep{0};

    void help(int number) {
        for (uint64_t seen = 0;;) {
            for (int spins = 0; job.load() == seen; spins++) {
                if (spins < MOST_SPINS) {
                    pause();
                    continue;
                }
                std::unique_lock<std::mutex> lock(sleeping);
                asleep.fetch_add(1);
                wake.wait(lock, [&] { return job.load() != seen; });
                asleep.fetch_sub(1);
            }
            seen = job.load();
            if (inside.fetch_add(1) >= OPEN && number < wanted) work(data);
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

// Calls f(0) ... f(count - 1); each thread takes the next number when it is free. If one runs out of
// memory, the caller's thread throws.
template <class F>
void parallel(int64_t count, int threads, const F& f) {
    struct Shared {
        const F& f;
        int64_t count;
        std::atomic<int64_t> next{0};
        std::atomic<bool> failed{false};
    } shared{f, count};
    auto work = [](void* data) {
        Shared& s = *static_cast<Shared*>(data);
        try {
            for (int64_t i; (i = s.next.fetch_add(1)) < s.count;) s.f(i);
        } catch (const std::bad_alloc&) {
            s.failed = true;
        }
    };
    if (count > 1 && threads > 1) pool().run(work, &shared, std::min<int64_t>(threads, count));
    else work(&shared);
    if (shared.failed) throw std::bad_alloc();
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
