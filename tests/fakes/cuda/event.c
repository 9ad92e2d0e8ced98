/* Events: how far a stream had come when one was recorded. An event counts its records; who waits
 * for it waits for the last one that there was by then. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <unistd.h>

#include "fake.h"

struct CUevent_st {
    unsigned int flags;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t records, done;
    int64_t at_ns;
    int references; /* the caller's, and one per step that names it */
};

static void let_event_go(CUevent event) {
    pthread_mutex_lock(&event->lock);
    bool last = --event->references == 0;
    pthread_mutex_unlock(&event->lock);
    if (!last) return;
    pthread_mutex_destroy(&event->lock);
    pthread_cond_destroy(&event->changed);
    free(event);
}

EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags) {
    ENTER_CONTEXT();
    bool interprocess = flags & CU_EVENT_INTERPROCESS;
    if (flags > 7 || (interprocess && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    CUevent made = calloc(1, sizeof *made);
    if (made == NULL) return CUDA_ERROR_OUT_OF_MEMORY;
    made->flags = flags;
    made->references = 1;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    *event = made;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    ENTER_CONTEXT();
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    let_event_go(event);
    return CUDA_SUCCESS;
}

struct event_step {
    struct step step;
    CUevent event;
    uint64_t record;
};

static void drop_record(struct step *step) {
    struct event_step *of = (struct event_step *)step;
    /* Here, not where it runs: a record that an error skipped must not be waited for. */
    pthread_mutex_lock(&of->event->lock);
    if (of->event->done < of->record) of->event->done = of->record;
    pthread_cond_broadcast(&of->event->changed);
    pthread_mutex_unlock(&of->event->lock);
    let_event_go(of->event);
    free(of);
}

static CUresult run_record(struct step *step, CUstream stream) {
    (void)stream;
    struct event_step *of = (struct event_step *)step;
    pthread_mutex_lock(&of->event->lock);
    of->event->at_ns = now_ns();
    pthread_mutex_unlock(&of->event->lock);
    return CUDA_SUCCESS; /* `drop` says that it happened */
}

static void wait_for_record(CUevent event, uint64_t record) {
    pthread_mutex_lock(&event->lock);
    while (event->done < record) pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

static CUresult run_wait(struct step *step, CUstream stream) {
    (void)stream;
    struct event_step *of = (struct event_step *)step;
    wait_for_record(of->event, of->record);
    return CUDA_SUCCESS;
}

static void drop_wait(struct step *step) {
    let_event_go(((struct event_step *)step)->event);
    free(step);
}

static struct event_step *step_of(CUevent event, bool records) {
    struct event_step *of = calloc(1, sizeof *of);
    if (of == NULL) return NULL;
    pthread_mutex_lock(&event->lock);
    event->references++;
    of->record = records ? ++event->records : event->records;
    pthread_mutex_unlock(&event->lock);
    of->event = event;
    of->step.run = records ? run_record : run_wait;
    of->step.drop = records ? drop_record : drop_wait;
    return of;
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER_CONTEXT();
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = check_stream(stream);
    if (result != CUDA_SUCCESS) return result;
    struct event_step *of = step_of(event, true);
    return of == NULL ? CUDA_ERROR_OUT_OF_MEMORY : enqueue(stream, &of->step, false);
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags) {
    ENTER_CONTEXT();
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1) return CUDA_ERROR_INVALID_VALUE;
    struct event_step *of = step_of(event, false);
    return of == NULL ? CUDA_ERROR_OUT_OF_MEMORY : enqueue(stream, &of->step, false);
}

/* -- captures: only what other threads may not do meanwhile ----------------------------------- */

static _Thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (mode == NULL) return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}

static CUresult capture_forbids(void) {
    bool captures = setting(CAPTURE_PID) == getpid();
    if (!captures || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

EXPORT CUresult cuEventQuery(CUevent event) {
    ENTER_CONTEXT();
    if (capture_forbids() != CUDA_SUCCESS) return capture_forbids();
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&event->lock);
    bool done = event->done == event->records;
    pthread_mutex_unlock(&event->lock);
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    ENTER_CONTEXT();
    if (capture_forbids() != CUDA_SUCCESS) return capture_forbids();
    if (event == NULL) return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&event->lock);
    uint64_t record = event->records;
    pthread_mutex_unlock(&event->lock);
    wait_for_record(event, record);
    return sticky_error();
}

EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent from, CUevent to) {
    ENTER_CONTEXT();
    if (from == NULL || to == NULL) return CUDA_ERROR_INVALID_HANDLE;
    if ((from->flags | to->flags) & CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_HANDLE;
    if (from->records == 0 || to->records == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (cuEventQuery(from) != CUDA_SUCCESS || cuEventQuery(to) != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)(to->at_ns - from->at_ns) / 1e6f;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent from, CUevent to) {
    return cuEventElapsedTime(milliseconds, from, to);
}
