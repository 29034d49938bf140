// The pool of threads, for a sanitizer: each part of a job once, in whose range it is, by 1 to 16
// threads and callers at once.
//
//     c++ -std=c++17 -O1 -g -fsanitize=thread -pthread pool_check.cpp -o check && ./check

#include "../../../kernels/native/threads.h"

#include <cstdio>
#include <random>

namespace {

void check(bool good, const char* what) {
    if (good) return;
    printf("failed: %s\n", what);
    fflush(stdout);
    _Exit(1);
}

// Jobs of random sizes; each writes what its parts are without a lock, so two threads in one race.
void check_random_jobs(int seed, int jobs) {
    std::mt19937 random(seed);
    std::vector<char> weights(1 << 16);
    for (int job = 0; job < jobs; job++) {
        int count = random() % (job % 4 ? 40 : 3000);
        int threads = 1 + random() % 16, fails_at = job % 7 ? -1 : (int)(random() % (count + 1));
        Upcoming next{job % 3 ? weights.data() : nullptr, 30, 2000, threads};
        std::vector<int> times(count);
        bool thrown = false;
        auto f = [&](int64_t i) {
            if (i == fails_at) throw std::bad_alloc();
            times[i]++;
        };
        try {
            parallel(count, threads, f, job % 2, next);
        } catch (const std::bad_alloc&) {
            thrown = true;
        }
        check(thrown == (fails_at >= 0 && fails_at < count), "want of memory reaches the caller");
        for (int n : times) check(thrown ? n <= 1 : n == 1, "a part is done once");
    }
}

// All threads begin before any goes on: each has the front of its own range.
void check_own_ranges(int threads, int64_t each) {
    std::atomic<int> begun{0};
    std::vector<std::atomic<int>> fronts(threads);
    static thread_local int inside;
    static int calls;
    calls++;
    parallel(threads * each, threads, [&](int64_t i) {
        if (inside == calls) return;  // not this thread's first
        inside = calls;
        if (i % each == 0) fronts[i / each]++;
        for (begun++; begun < threads;) std::this_thread::yield();
    }, true);
    for (auto& n : fronts) check(n == 1, "a thread begins with its own range");
}

// The caller stays in its first part until others have done all the rest.
void check_that_others_help(int threads, int64_t count) {
    std::atomic<int64_t> left{count};
    parallel(count, threads, [&](int64_t i) {
        left--;
        while (i == 0 && left > 0) std::this_thread::yield();
    }, true);
    check(left == 0, "the range of a thread that is held up is taken over");
}

}  // namespace

int main() {
    check_random_jobs(0, 1500);
    for (int threads = 2; threads <= 16; threads++) {
        check_own_ranges(threads, 1 + threads % 5);
        check_that_others_help(threads, 3 * threads + 1), check_that_others_help(threads, 500);
    }
    std::vector<std::thread> callers;  // one has the pool, the others work alone
    for (int i = 1; i <= 3; i++) callers.emplace_back(check_random_jobs, i, 500);
    for (auto& caller : callers) caller.join();
}
