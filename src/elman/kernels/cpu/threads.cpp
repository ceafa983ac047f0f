/* Who runs the tasks of a call: torch's own threads on a quiet machine, ours beside other programs.
 *
 * Results never depend on who runs a task, nor on how many do. */
#include "job.h"
#include "subnormals.h"
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <dlfcn.h>
#include <fcntl.h>
#include <new>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace {

using Task = void (*)(void *, int64_t);

int64_t nanoseconds(clockid_t clock) {
    timespec t;
    clock_gettime(clock, &t);
    return int64_t(t.tv_sec) * 1000000000 + t.tv_nsec;
}
int64_t now() { return nanoseconds(CLOCK_MONOTONIC); }

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

/* How long a caller looks for the end of what others do before it sleeps, and a thread of ours for more to do: through
 * what callers do alone between two calls. To be woken costs less, but whoever has slept beside other programs may have to
 * wait for their slice of time to end. */
constexpr int64_t SPIN = 200000, LINGER = 400000;

/* Look until `found`, for a moment; whether it was. */
template <class F> bool spin(int64_t moment, F &&found) {
    for (int64_t stop = now() + moment;;) {
        for (int i = 0; i < 32; i++) {
            if (found()) return true;
            pause();
        }
        if (now() > stop) return false;
    }
}

int64_t processor_time() { return nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

/* How long this thread was kept from running, in all. Linux writes it into a file. Processor time would tell, too, but
 * slices of threads that ask for it were seen to end early, not at the next tick as everybody else's: then threads that
 * began together no longer run together. */
struct Kept {
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    ~Kept() {
        if (file >= 0) close(file);
    }
    int64_t time() const {
        char text[64], *rest; /* run, waited, times */
        ssize_t n = file < 0 ? -1 : pread(file, text, sizeof text - 1, 0);
        if (n <= 0) return now() - processor_time(); /* and slept */
        text[n] = 0;
        strtoll(text, &rest, 10);
        return strtoll(rest, nullptr, 10);
    }
};
int64_t kept_time() {
    static thread_local const Kept kept;
    return kept.time();
}

/* A thread that does not run for so long was kept from it by others. */
constexpr int64_t LATE = 500000;

/* Whether others had this thread's core for a while since it was made. To ask costs a microsecond, so a little time
 * before may count, and nobody asks about what was over soon. */
struct Watch {
    struct Look {
        int64_t time, kept;
    };
    static thread_local Look last;
    static constexpr int64_t RECENT = LATE / 2;
    const int64_t begun = now();

    Watch() {
        if (begun - last.time > RECENT) last = {begun, kept_time()};
    }
    int64_t taken() const { return now() - begun; }
    bool late() const {
        if (taken() < LATE) return false;
        Look before = last;
        last = {now(), kept_time()};
        return last.kept - before.kept > LATE;
    }
};
thread_local Watch::Look Watch::last{0, 0};

/* Asks for short slices of time for this thread: one that has slept while others ran then takes its core as soon as it
 * is woken, and not when their slices end. It gets no more time than before. */
void run_soon() {
#if defined(SYS_sched_setattr)
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice, deadline, period;
    } how = {};
    if (syscall(SYS_sched_getattr, 0, &how, sizeof how, 0) || how.policy != SCHED_OTHER) return;
    how.slice = 100000; /* the least there is; before Linux 6.12 nobody looks at it */
    syscall(SYS_sched_setattr, 0, &how, 0);
#endif
}

/* A thread that nobody waits for, with all signals blocked: they are for the program's own threads. Whether it began. */
bool start_thread(void *(*begin)(void *), void *data) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool ok = !pthread_create(&thread, nullptr, begin, data);
    if (ok) pthread_detach(thread);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return ok;
}

#if defined(__linux__)
int available_cores() {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}
#else
int available_cores() { return 1; }
#endif

/* Threads of our own. The caller claims tasks like everybody else and waits only for tasks that somebody
 * has begun: a thread that is not running holds nothing. Who finds nothing to do soon sleeps. */
struct Crew {
    static constexpr int MOST = 255;
    /* The region that runs: its number, and how many of its tasks nobody has claimed yet. A claim changes
     * both in one step, so it can only succeed for the region that the other fields describe. */
    std::atomic<uint64_t> ticket{0};
    std::atomic<Task> task{nullptr};
    std::atomic<void *> data{nullptr};
    std::atomic<int64_t> tasks{0}, done{0};
    std::atomic<int> helpers{0}, sleeping{0};
    std::atomic<bool> caller_sleeps{false};
    std::atomic_flag taken = ATOMIC_FLAG_INIT;
    int started = 0;
    std::atomic<bool> helped{false}; /* whether anyone came to this region */
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t more = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;

    static constexpr uint64_t LEFT = 0xffffffff;

    /* Claim and run tasks until none is left. */
    void work() {
        for (uint64_t seen = ticket.load(); seen & LEFT;) {
            Task run = task.load();
            void *with = data.load();
            int64_t all = tasks.load();
            if (!ticket.compare_exchange_weak(seen, seen - 1)) continue;
            run(with, all - int64_t(seen & LEFT));
            if (done.fetch_add(1) + 1 == all && caller_sleeps.load()) {
                pthread_mutex_lock(&lock);
                pthread_cond_signal(&finished);
                pthread_mutex_unlock(&lock);
            }
            seen = ticket.load();
        }
    }
    bool wanted(int i) const { return (ticket.load() & LEFT) && i < helpers.load(); }
    void help(int i) {
        NoSubnormals here;
        run_soon();
        for (;;) {
            if (spin(LINGER, [&] { return wanted(i); })) {
                helped = true;
                work();
                continue;
            }
            pthread_mutex_lock(&lock);
            sleeping++;
            while (!wanted(i)) pthread_cond_wait(&more, &lock);
            sleeping--;
            pthread_mutex_unlock(&lock);
        }
    }
    void wait(int64_t all) {
        auto ready = [&] { return done.load() == all; };
        if (spin(SPIN, ready)) return;
        pthread_mutex_lock(&lock);
        caller_sleeps = true;
        while (!ready()) pthread_cond_wait(&finished, &lock);
        caller_sleeps = false;
        pthread_mutex_unlock(&lock);
    }
    /* Whether somebody came to help in time. */
    bool run(int64_t threads, int64_t all, Task what, void *with);
    void start(int64_t wanted);
};

Crew crew;

struct Helper {
    static void *begin(void *number) {
        crew.help(int(reinterpret_cast<intptr_t>(number)));
        return nullptr;
    }
};

void Crew::start(int64_t wanted) {
    for (; started < wanted && started < MOST; started++)
        if (!start_thread(Helper::begin, reinterpret_cast<void *>(intptr_t(started)))) break;
}

bool Crew::run(int64_t threads, int64_t all, Task what, void *with) {
    if (started < threads - 1) start(threads - 1);
    task = what, data = with, tasks = all, done = 0, helpers = int(threads - 1);
    helped = false;
    int64_t begun = now();
    ticket = ((ticket.load() >> 32) + 1) << 32 | uint64_t(all);
    if (sleeping.load()) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&more);
        pthread_mutex_unlock(&lock);
    }
    work();
    bool in_time = helped.load() || now() - begun < LATE;
    wait(all);
    return in_time;
}

/* OpenMP's threads wait for one another looking, for milliseconds, but as soon as there are more of them than cores (so its
 * manual says) for a moment only. So beside other programs a thread of ours keeps a team of idle ones, and everything
 * that torch itself does in parallel becomes patient. It ends when the machine is quiet, or when nothing of ours has run for
 * some seconds. */
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);

struct Crowd {
    static constexpr int MOST = 64; /* cores */
    static constexpr int64_t IDLE = 3000000000;
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    std::atomic<bool> wanted{false};
    std::atomic<int64_t> used{0}; /* when */
    bool here = false;
    Parallel parallel = nullptr;

    static void *stay(void *p) {
        Crowd &crowd = *static_cast<Crowd *>(p);
        pthread_mutex_lock(&crowd.lock);
        Parallel parallel = crowd.parallel;
        pthread_mutex_unlock(&crowd.lock);
        parallel([](void *) {}, nullptr, unsigned(available_cores()), 0);
        pthread_mutex_lock(&crowd.lock);
        while (crowd.wanted.load() && now() - crowd.used.load() < IDLE) {
            timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec++;
            pthread_cond_timedwait(&crowd.changed, &crowd.lock, &until);
        }
        crowd.wanted = crowd.here = false;
        pthread_mutex_unlock(&crowd.lock);
        return nullptr;
    }
    void want(bool more, Parallel through) {
        used = now();
        if (wanted.load() == more) return;
        pthread_mutex_lock(&lock);
        wanted = more;
        if (more) parallel = through;
        int cores = available_cores();
        if (more && !here && cores > 1 && cores <= MOST && start_thread(stay, this)) here = true;
        pthread_cond_signal(&changed);
        pthread_mutex_unlock(&lock);
    }
};

Crowd crowd;

/* Torch's own threads, through the entry point that compilers emit calls to for `#pragma omp parallel`.
 *
 * On a quiet machine nothing is faster: they look for work for milliseconds after every operation of
 * torch, and threads of ours would have to fight them for the processor. Beside other programs nothing is
 * slower: everyone waits, looking, for the one who is not running. So each region is watched. One that is
 * late says little, since a virtual machine hesitates every few hundred regions with nothing else to do;
 * beside other programs much of the time is lost so, in every other region or, of short ones, in every tenth. */
struct Team {
    static constexpr int64_t SHORT = 1000000000, LONG = 64 * SHORT;  /* we do without it, before it is tried again */
    static constexpr int64_t MEMORY = 30000000;                      /* of time in regions */
    static constexpr double MUCH = 0.2, NONE = 0.01;                 /* of it, lost */
    static constexpr int64_t NEVER = INT64_MAX;
    std::atomic<int64_t> back{0}, away{SHORT}, calm{0};
    std::atomic<double> lost{0}; /* lately */

    struct Region {
        Task task;
        void *data;
        int64_t tasks, begun = now();
        std::atomic<int64_t> next{0}, late{0}; /* the time that the latest of all was kept from running */
        int64_t threads = 1;
        std::atomic<uint64_t> claimed{0}; /* a bit for each task, where they are that few */

        void run(int64_t i) {
            uint64_t bit = uint64_t(1) << i;
            if (!(claimed.load() & bit) && !(claimed.fetch_or(bit) & bit)) task(data, i);
        }
        /* First those of the n-th thread, so that it has what it had in other regions of as many, whose numbers its core's
         * cache may hold; then, from the last on, what others have not begun. */
        void run_as(int64_t n) {
            int64_t from = tasks * n / threads, to = tasks * (n + 1) / threads;
            for (int64_t i = from; i < to; i++) run(i);
            for (int64_t i = tasks - 1; i >= 0; i--)
                if (i < from || i >= to) run(i);
        }
    };
    static void work(void *p) {
        static const auto number = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
        Region &region = *static_cast<Region *>(p);
        NoSubnormals here;
        int64_t ran = -processor_time();
        if (number && region.tasks <= 64)
            region.run_as(number());
        else
            for (int64_t i; (i = region.next.fetch_add(1)) < region.tasks;) region.task(region.data, i);
        ran += processor_time();
        int64_t late = now() - region.begun - ran, most = region.late;
        while (late > LATE && late > most && !region.late.compare_exchange_weak(most, late)) {}
    }
    /* Whether it ran the tasks. */
    bool run(int64_t threads, int64_t tasks, Task task, void *data) {
        static const Parallel parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        if (!parallel || now() < back.load()) return false;
        Region region{task, data, tasks};
        region.threads = threads;
        parallel(work, &region, unsigned(threads), 0);
        bool much = judge(now() - region.begun, region.late) >= MUCH;
        if (much) leave(region.begun);
        if (much || lost.load() < NONE) crowd.want(much, parallel);
        return true;
    }
    /* The share of time lost lately, with one more region. Threads that meet here may overlook one. */
    double judge(int64_t taken, int64_t late) {
        double before = lost.load(), share = before + (double(late) - before * double(taken)) / double(taken + MEMORY);
        lost = share;
        return share;
    }
    void leave(int64_t begun) {
        bool again = begun < back.load() + away.load(); /* hardly tried, and late already */
        away = !again ? SHORT : away.load() < LONG ? 2 * away.load() : LONG;
        back = now() + away.load();
        calm = 0;
        lost = MUCH / 2; /* to begin with, when it is tried again */
    }
    bool is_away() const { return back.load() && now() < back.load(); }
    /* While we do without it: a caller has run its tasks. If nobody is kept from running any more, it is tried again,
     * the later the more often that was too early; others' slices of time last some milliseconds. */
    void note(bool late, int64_t taken) {
        if (back.load() == NEVER) return;
        crowd.used = now();
        if (late) calm = 0;
        else if (calm.fetch_add(taken) + taken > away.load() / 20) back = now(), crowd.want(false, nullptr);
    }
};

Team team;

/* A child has none of its parent's threads, and OpenMP would wait for them. */
void after_fork() {
    new (&crew) Crew;
    new (&crowd) Crowd;
    team.back = Team::NEVER;
}
__attribute__((constructor)) void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork); }

} // namespace

bool is_busy() { return team.is_away(); }

/* Without OpenMP; whether nobody was missing. */
static bool run_tasks(int64_t threads, int64_t tasks, Task task, void *data) {
    /* Too little for two, or the tasks of another call are running: alone. */
    if (threads <= 1 || uint64_t(tasks) > Crew::LEFT || crew.taken.test_and_set()) {
        for (int64_t i = 0; i < tasks; i++) task(data, i);
        return true;
    }
    bool in_time = crew.run(threads, tasks, task, data);
    crew.taken.clear();
    return in_time;
}

void parallel(int64_t threads, int64_t tasks, Task task, void *data) {
    if (threads > tasks) threads = tasks;
    if (threads > 1 && team.run(threads, tasks, task, data)) return;
    if (!is_busy()) {
        run_tasks(threads, tasks, task, data);
        return;
    }
    Watch watch;
    bool in_time = run_tasks(threads, tasks, task, data);
    team.note(!in_time || watch.late(), watch.taken());
}
