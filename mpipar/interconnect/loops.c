/* The loops of a benchmark in C, as a baseline for the rows of Python.

   They follow the descriptions of OSU's benchmarks: a ping-pong by MPI_Send and MPI_Recv, a window
   of MPI_Isend or MPI_Irecv with one MPI_Waitall and a short answer, and MPI_Allreduce. Ranks,
   communicators and buffers are those of the Python rows; compiled.py calls these functions.

   Each function takes `samples` samples. A sample begins after a barrier of the team, if there is
   one. entered, left: nanoseconds of the monotonic clock, which Python's perf_counter_ns reads too.
   xs, ys: the buffers to send and to receive into, one after the other, for all samples. */
#include <mpi.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { TAG = 5, ACK_TAG = 6 };

typedef struct {
    MPI_Comm *team, *group; /* who starts together (NULL: no barrier), and who communicates */
    MPI_Datatype *type;     /* of all-reduce */
    MPI_Op *op;
    int samples, peer, first; /* first: this rank sends first, and its clock is used */
    int count;                /* bytes of a message, elements of all-reduce */
    int sends, receives;      /* of this rank in a sample */
    char **xs, **ys, *ack;
    int64_t *entered, *left;
} Loop;

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static void start(const Loop *loop, int sample)
{
    if (loop->team)
        MPI_Barrier(*loop->team);
    loop->entered[sample] = now();
}

int is_running(void) /* whether this library's MPI is the one that the process has started */
{
    int yes = 0;
    MPI_Initialized(&yes);
    return yes;
}

void latency(const Loop *loop)
{
    char **xs = loop->xs, **ys = loop->ys;
    for (int sample = 0; sample < loop->samples; sample++) {
        start(loop, sample);
        for (int round = 0; round < loop->sends; round++, xs++, ys++) {
            if (loop->first)
                MPI_Send(*xs, loop->count, MPI_BYTE, loop->peer, TAG, *loop->group);
            MPI_Recv(*ys, loop->count, MPI_BYTE, loop->peer, TAG, *loop->group,
                     MPI_STATUS_IGNORE);
            if (!loop->first)
                MPI_Send(*xs, loop->count, MPI_BYTE, loop->peer, TAG, *loop->group);
        }
        loop->left[sample] = now();
    }
}

void window(const Loop *loop)
{
    char **xs = loop->xs, **ys = loop->ys;
    MPI_Request *requests = malloc((loop->receives + loop->sends) * sizeof *requests);
    for (int sample = 0; sample < loop->samples; sample++) {
        int posted = 0;
        start(loop, sample);
        for (int k = 0; k < loop->receives; k++)
            MPI_Irecv(*ys++, loop->count, MPI_BYTE, loop->peer, TAG, *loop->group,
                      &requests[posted++]);
        for (int k = 0; k < loop->sends; k++)
            MPI_Isend(*xs++, loop->count, MPI_BYTE, loop->peer, TAG, *loop->group,
                      &requests[posted++]);
        MPI_Waitall(posted, requests, MPI_STATUSES_IGNORE);
        if (loop->first)
            MPI_Recv(loop->ack, 4, MPI_BYTE, loop->peer, ACK_TAG, *loop->group,
                     MPI_STATUS_IGNORE);
        else
            MPI_Send(loop->ack, 4, MPI_BYTE, loop->peer, ACK_TAG, *loop->group);
        loop->left[sample] = now();
    }
    free(requests);
}

void all_reduce(const Loop *loop)
{
    for (int sample = 0; sample < loop->samples; sample++) {
        start(loop, sample);
        MPI_Allreduce(MPI_IN_PLACE, loop->xs[sample], loop->count, *loop->type, *loop->op,
                      *loop->group);
        loop->left[sample] = now();
    }
}
