/* Streams: each is a queue with a thread of its own, so that what is called asynchronous happens
 * later, in order, and beside the caller.
 *
 * One thing is weaker than CUDA: the NULL stream doesn't wait for other streams, nor they for it.
 * A program that is right here doesn't lean on that. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

struct CUstream_st {
    CUstream next; /* in the list of all */
    CUdevice device;
    unsigned int flags;
    int priority;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct step *first, *last;
    uint64_t tickets, done; /* steps given and finished */
    bool ending;
    int64_t free_at_ns; /* when what was copied so far would be through, by the bandwidth */
};

/* Read by who looks for a stream or waits for all, written by who makes or ends one. */
static pthread_rwlock_t streams_lock = PTHREAD_RWLOCK_INITIALIZER;
static CUstream all_streams;

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void sleep_until(int64_t at_ns) {
    struct timespec at = {.tv_sec = at_ns / 1000000000LL, .tv_nsec = at_ns % 1000000000LL};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL);
}

/* Called on the stream's thread for bytes about to be copied: waits as the bandwidth asks. */
void pace(CUstream stream, size_t bytes) {
    long long per_second = setting(BANDWIDTH);
    if (per_second <= 0) return;
    int64_t now = now_ns();
    if (stream->free_at_ns < now) stream->free_at_ns = now;
    stream->free_at_ns += (int64_t)((double)bytes / (double)per_second * 1e9);
    if (stream->free_at_ns > now + 500000) sleep_until(stream->free_at_ns);
}

/* -- a stream's thread -- */

static struct step *next_step(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    while (stream->first == NULL && !stream->ending)
        pthread_cond_wait(&stream->changed, &stream->lock);
    struct step *step = stream->first;
    if (step != NULL) stream->first = step->next;
    if (stream->first == NULL) stream->last = NULL;
    pthread_mutex_unlock(&stream->lock);
    return step;
}

static void *run_stream(void *of) {
    CUstream stream = of;
    struct step *step;
    while ((step = next_step(stream)) != NULL) {
        if (setting(LATENCY) > 0) usleep((useconds_t)setting(LATENCY));
        if (sticky_error() == CUDA_SUCCESS) {
            CUresult result = step->run(step, stream);
            if (result != CUDA_SUCCESS) fail_for_good(result);
        }
        uint64_t ticket = step->ticket;
        step->drop(step);
        pthread_mutex_lock(&stream->lock);
        stream->done = ticket;
        pthread_cond_broadcast(&stream->changed);
        pthread_mutex_unlock(&stream->lock);
    }
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->changed);
    free(stream);
    return NULL;
}

static CUstream make_stream(unsigned int flags, int priority) {
    CUstream stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    stream->device = current_context()->device;
    stream->flags = flags;
    stream->priority = priority;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_stream, stream) != 0) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    return stream;
}

static void end_stream(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    stream->ending = true; /* it does first what is queued */
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

/* -- finding a stream by what the caller gave -- */

bool is_null_stream(CUstream stream) { return stream == NULL || stream == CU_STREAM_LEGACY; }

static bool is_listed(CUstream stream) {
    pthread_rwlock_rdlock(&streams_lock);
    CUstream at = all_streams;
    while (at != NULL && at != stream) at = at->next;
    pthread_rwlock_unlock(&streams_lock);
    return at != NULL;
}

static CUstream null_stream(void) {
    CUcontext context = current_context();
    pthread_rwlock_wrlock(&streams_lock);
    if (context->null_stream == NULL) {
        context->null_stream = make_stream(0, 0);
        if (context->null_stream != NULL) {
            context->null_stream->next = all_streams;
            all_streams = context->null_stream;
        }
    }
    pthread_rwlock_unlock(&streams_lock);
    return context->null_stream;
}

static CUresult find_stream(CUstream given, CUstream *found) {
    if (is_null_stream(given) || given == CU_STREAM_PER_THREAD) given = null_stream();
    if (given == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *found = given;
    return is_listed(given) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult check_stream(CUstream stream) {
    CUstream found;
    return find_stream(stream, &found);
}

/* -- the queue -- */

static void wait_for(CUstream stream, uint64_t ticket) {
    pthread_mutex_lock(&stream->lock);
    while (stream->done < ticket) pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

/* Put a step at the queue's end; the queue owns it. With `wait`, return once it was done. */
CUresult enqueue(CUstream given, struct step *step, bool wait) {
    CUstream stream;
    CUresult result = find_stream(given, &stream);
    if (result != CUDA_SUCCESS) {
        step->drop(step);
        return result;
    }
    pthread_mutex_lock(&stream->lock);
    uint64_t ticket = step->ticket = ++stream->tickets;
    step->next = NULL;
    if (stream->last != NULL)
        stream->last->next = step;
    else
        stream->first = step;
    stream->last = step;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    if (wait) wait_for(stream, ticket);
    return wait ? sticky_error() : CUDA_SUCCESS;
}

static void drain(CUstream stream) {
    pthread_mutex_lock(&stream->lock);
    uint64_t ticket = stream->tickets;
    pthread_mutex_unlock(&stream->lock);
    wait_for(stream, ticket);
}

void drain_streams(void) {
    pthread_rwlock_rdlock(&streams_lock); /* no stream ends meanwhile; they go on by themselves */
    for (CUstream stream = all_streams; stream != NULL; stream = stream->next) drain(stream);
    pthread_rwlock_unlock(&streams_lock);
}

void end_streams_of(CUdevice device) {
    pthread_rwlock_wrlock(&streams_lock);
    for (CUstream *link = &all_streams; *link != NULL;) {
        CUstream stream = *link;
        if (stream->device != device) {
            link = &stream->next;
            continue;
        }
        drain(stream);
        *link = stream->next;
        end_stream(stream);
    }
    pthread_rwlock_unlock(&streams_lock);
}

/* -- streams as the API has them -- */

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority) {
    ENTER_CONTEXT();
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    CUstream made = make_stream(flags, priority);
    if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_rwlock_wrlock(&streams_lock);
    made->next = all_streams;
    all_streams = made;
    pthread_rwlock_unlock(&streams_lock);
    *stream = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    ENTER_CONTEXT();
    if (is_null_stream(stream) || stream == CU_STREAM_PER_THREAD) return CUDA_ERROR_INVALID_HANDLE;
    pthread_rwlock_wrlock(&streams_lock);
    CUstream *link = &all_streams;
    while (*link != NULL && *link != stream) link = &(*link)->next;
    bool found = *link != NULL;
    if (found) *link = stream->next;
    pthread_rwlock_unlock(&streams_lock);
    if (!found) return CUDA_ERROR_INVALID_HANDLE;
    end_stream(stream);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream given) {
    ENTER_CONTEXT();
    CUstream stream;
    CUresult result = find_stream(given, &stream);
    if (result != CUDA_SUCCESS) return result;
    drain(stream);
    return sticky_error();
}

EXPORT CUresult cuStreamQuery(CUstream given) {
    ENTER_CONTEXT();
    CUstream stream;
    CUresult result = find_stream(given, &stream);
    if (result != CUDA_SUCCESS) return result;
    pthread_mutex_lock(&stream->lock);
    bool idle = stream->done == stream->tickets;
    pthread_mutex_unlock(&stream->lock);
    return idle ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuStreamGetFlags(CUstream given, unsigned int *flags) {
    ENTER_CONTEXT();
    CUstream stream;
    CUresult result = find_stream(given, &stream);
    if (result == CUDA_SUCCESS) *flags = stream->flags;
    return result;
}

EXPORT CUresult cuStreamGetPriority(CUstream given, int *priority) {
    ENTER_CONTEXT();
    CUstream stream;
    CUresult result = find_stream(given, &stream);
    if (result == CUDA_SUCCESS) *priority = stream->priority;
    return result;
}

/* -- a function of the caller's, on the stream's thread -- */

struct call {
    struct step step;
    CUhostFn function;
    void *argument;
};

static CUresult run_call(struct step *step, CUstream stream) {
    (void)stream;
    struct call *call = (struct call *)step;
    call->function(call->argument);
    return CUDA_SUCCESS;
}

static void drop_call(struct step *step) { free(step); }

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *argument) {
    ENTER_CONTEXT();
    struct call *call = calloc(1, sizeof *call);
    if (call == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    *call = (struct call){.step = {.run = run_call, .drop = drop_call},
                          .function = function,
                          .argument = argument};
    return enqueue(stream, &call->step, false);
}
