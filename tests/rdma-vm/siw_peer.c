/*
 * A peer on kernel RDMA that does what it is told: one connection, one command a line on stdin, one line of answer each.
 * Nothing of Bulkhead is in it: librdmacm and libibverbs alone, so that our iWARP stack meets somebody else's, and so that a
 * peer can stop where ours do not. It serves siw and every other device.
 *
 *   cc -Wall -Wextra -Werror -o siw_peer siw_peer.c -lrdmacm -libverbs
 *
 *   listen ADDRESS PORT          listening PORT                     port 0: any
 *   request                      request DATA IRD ORD               waits for a peer; its queue pair is made
 *   accept DATA IRD ORD          established DATA IRD ORD
 *   reject DATA                  rejected
 *   dial ADDRESS PORT            dialled                            resolved; the queue pair is made, nothing is sent
 *   resolve ADDRESS PORT         resolved                           the same without a queue pair
 *   connect DATA IRD ORD         established DATA IRD ORD | refused STATUS DATA | failed EVENT STATUS
 *                                answered DATA IRD ORD              without a queue pair, where that is possible: reject refuses it
 *   ask DATA IRD ORD             asked                              connect, but waits for nothing
 *   look                         there                              waits until there is an event, and does not take it
 *   region LEN RIGHTS            region INDEX KEY ADDRESS           RIGHTS: of w(rite) r(ead), or -
 *   fill REGION OFFSET OCTETS    filled
 *   dump REGION OFFSET LEN       octets OCTETS
 *   receive REGION OFFSET LEN    posted                             and so for the next three
 *   send REGION OFFSET LEN
 *   invalidate REGION OFFSET LEN KEY                                a Send with Invalidate
 *   write REGION OFFSET LEN KEY ADDRESS
 *   read REGION OFFSET LEN KEY ADDRESS
 *   poll                         completion OPERATION STATUS LEN    waits for one
 *   event                        event NAME STATUS                  waits for one of the connection manager
 *   disconnect                   disconnected                       and waits for the event
 *
 * DATA and OCTETS are hexadecimal, "-" for none; KEY and ADDRESS are hexadecimal, the other numbers decimal. What cannot be
 * done is answered with "error WHAT: WHY". End of input ends it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define REGIONS 16
#define DEPTH 64
#define WORDS 8
/* Emulated machines are slow; who waits this long waits for ever. */
#define PATIENCE_S 240

static struct rdma_event_channel *channel;
static struct rdma_cm_id *listener, *id;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct {
    char *octets;
    size_t len;
    struct ibv_mr *mr;
} regions[REGIONS];
static int region_count;

static void failed(const char *what) { printf("error %s: %s\n", what, strerror(errno)); }

static void print_hex(const void *data, size_t len) {
    const unsigned char *octets = data;
    if (len == 0) putchar('-');
    for (size_t n = 0; n < len; n++) {
        putchar_unlocked("0123456789abcdef"[octets[n] >> 4]);
        putchar_unlocked("0123456789abcdef"[octets[n] & 15]);
    }
}

static int digit(char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

/* Octets of a hexadecimal word, at most `max`; -1 if it is none. */
static int parse_hex(const char *word, unsigned char *out, size_t max) {
    size_t len = strlen(word) / 2;
    if (strcmp(word, "-") == 0) return 0;
    if (strlen(word) % 2 || len > max) return -1;
    for (size_t n = 0; n < len; n++) {
        int high = digit(word[2 * n]), low = digit(word[2 * n + 1]);
        if (high < 0 || low < 0) return -1;
        out[n] = (unsigned char)(high << 4 | low);
    }
    return (int)len;
}

/* Protection domain, completion queue and queue pair of the connection. */
static int make_queue_pair(void) {
    pd = ibv_alloc_pd(id->verbs);
    cq = pd ? ibv_create_cq(id->verbs, 4 * DEPTH, NULL, NULL, 0) : NULL;
    if (!cq) return -1;
    struct ibv_qp_init_attr attributes = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 1,
    };
    return rdma_create_qp(id, pd, &attributes);
}

static struct rdma_cm_event *next_event(void) {
    struct rdma_cm_event *event;
    return rdma_get_cm_event(channel, &event) == 0 ? event : NULL;
}

/* Waits for one event of this kind. */
static int expect(enum rdma_cm_event_type kind) {
    struct rdma_cm_event *event = next_event();
    if (!event) return -1;
    int ok = event->event == kind;
    if (!ok) errno = event->status < 0 ? -event->status : EPROTO;
    rdma_ack_cm_event(event);
    return ok ? 0 : -1;
}

static void print_outcome(struct rdma_cm_event *event) {
    const struct rdma_conn_param *conn = &event->param.conn;
    if (event->event == RDMA_CM_EVENT_ESTABLISHED || event->event == RDMA_CM_EVENT_CONNECT_RESPONSE) {
        printf(event->event == RDMA_CM_EVENT_ESTABLISHED ? "established " : "answered ");
        print_hex(conn->private_data, conn->private_data_len);
        printf(" %u %u\n", conn->responder_resources, conn->initiator_depth);
    } else if (event->event == RDMA_CM_EVENT_REJECTED) {
        printf("refused %d ", event->status);
        print_hex(conn->private_data, conn->private_data_len);
        putchar('\n');
    } else {
        printf("failed %s %d\n", rdma_event_str(event->event), event->status);
    }
    rdma_ack_cm_event(event);
}

static int parameters(char **word, struct rdma_conn_param *out, unsigned char *data) {
    int len = parse_hex(word[1], data, 255);
    if (len < 0) {
        errno = EINVAL;
        return -1;
    }
    *out = (struct rdma_conn_param){
        .private_data = data,
        .private_data_len = (uint8_t)len,
        .responder_resources = (uint8_t)atoi(word[2]),
        .initiator_depth = (uint8_t)atoi(word[3]),
        .retry_count = 7,
        .rnr_retry_count = 7,
    };
    return 0;
}

static int address_of(char **word, struct sockaddr_in *out) {
    *out = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(word[2]))};
    if (inet_pton(AF_INET, word[1], &out->sin_addr) == 1) return 0;
    errno = EINVAL;
    return -1;
}

static void do_listen(char **word) {
    struct sockaddr_in address;
    if (address_of(word, &address) || rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) ||
        rdma_bind_addr(listener, (struct sockaddr *)&address) || rdma_listen(listener, 8))
        return failed("listen");
    printf("listening %u\n", ntohs(rdma_get_src_port(listener)));
}

static void do_request(char **word) {
    (void)word;
    struct rdma_cm_event *event = next_event();
    if (!event) return failed("request");
    if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST) return print_outcome(event);
    const struct rdma_conn_param *conn = &event->param.conn;
    id = event->id;
    if (make_queue_pair()) {
        failed("make a queue pair");
    } else {
        printf("request ");
        print_hex(conn->private_data, conn->private_data_len);
        printf(" %u %u\n", conn->responder_resources, conn->initiator_depth);
    }
    rdma_ack_cm_event(event);
}

static void do_accept(char **word) {
    struct rdma_conn_param conn;
    unsigned char data[256];
    if (parameters(word, &conn, data) || rdma_accept(id, &conn)) return failed("accept");
    struct rdma_cm_event *event = next_event();
    if (!event) return failed("accept");
    print_outcome(event);
}

static void do_reject(char **word) {
    unsigned char data[256];
    int len = parse_hex(word[1], data, 255);
    if (len < 0 || rdma_reject(id, data, (uint8_t)len)) return failed("reject");
    puts("rejected");
}

static int resolve(char **word) {
    struct sockaddr_in address;
    return address_of(word, &address) || rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) ||
           rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, 60000) || expect(RDMA_CM_EVENT_ADDR_RESOLVED) ||
           rdma_resolve_route(id, 60000) || expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
}

static void do_resolve(char **word) {
    if (resolve(word)) return failed("resolve");
    puts("resolved");
}

static void do_dial(char **word) {
    if (resolve(word) || make_queue_pair()) return failed("dial");
    puts("dialled");
}

static void do_ask(char **word) {
    struct rdma_conn_param conn;
    unsigned char data[256];
    if (parameters(word, &conn, data) || rdma_connect(id, &conn)) return failed("ask");
    puts("asked");
}

static void do_look(char **word) {
    (void)word;
    struct pollfd ready = {.fd = channel->fd, .events = POLLIN};
    if (poll(&ready, 1, PATIENCE_S * 1000) != 1) return failed("look");
    puts("there");
}

static void do_connect(char **word) {
    struct rdma_conn_param conn;
    unsigned char data[256];
    if (parameters(word, &conn, data) || rdma_connect(id, &conn)) return failed("connect");
    struct rdma_cm_event *event = next_event();
    if (!event) return failed("connect");
    print_outcome(event);
}

static void do_region(char **word) {
    int access = IBV_ACCESS_LOCAL_WRITE;
    if (strchr(word[2], 'w')) access |= IBV_ACCESS_REMOTE_WRITE;
    if (strchr(word[2], 'r')) access |= IBV_ACCESS_REMOTE_READ;
    size_t len = strtoul(word[1], NULL, 10);
    if (region_count == REGIONS || !pd) {
        errno = ENOSPC;
        return failed("region");
    }
    char *octets = aligned_alloc(4096, (len + 4095) / 4096 * 4096);
    if (!octets) return failed("region");
    memset(octets, 0, len);
    struct ibv_mr *mr = ibv_reg_mr(pd, octets, len, access);
    if (!mr) return failed("region");
    regions[region_count].octets = octets;
    regions[region_count].len = len;
    regions[region_count].mr = mr;
    printf("region %d %x %" PRIxPTR "\n", region_count++, mr->rkey, (uintptr_t)octets);
}

/* The slice that the second to fourth word name. */
static int slice(char **word, size_t len, struct ibv_sge *out) {
    int region = atoi(word[1]);
    size_t offset = strtoul(word[2], NULL, 10);
    if (region < 0 || region >= region_count || offset > regions[region].len || len > regions[region].len - offset) {
        errno = ERANGE;
        return -1;
    }
    out->addr = (uintptr_t)regions[region].octets + offset;
    out->length = (uint32_t)len;
    out->lkey = regions[region].mr->lkey;
    return 0;
}

static void do_fill(char **word) {
    struct ibv_sge at;
    size_t len = strlen(word[3]) / 2;
    if (slice(word, len, &at) || parse_hex(word[3], (unsigned char *)at.addr, len) < 0) return failed("fill");
    puts("filled");
}

static void do_dump(char **word) {
    struct ibv_sge at;
    if (slice(word, strtoul(word[3], NULL, 10), &at)) return failed("dump");
    printf("octets ");
    print_hex((void *)at.addr, at.length);
    putchar('\n');
}

static void do_post(char **word) {
    struct ibv_sge at;
    if (slice(word, strtoul(word[3], NULL, 10), &at)) return failed(word[0]);
    struct ibv_send_wr *bad_send, send = {.sg_list = &at, .num_sge = at.length ? 1 : 0};
    struct ibv_recv_wr *bad_receive, receive = {.sg_list = &at, .num_sge = 1};
    if (strcmp(word[0], "receive") == 0) {
        errno = ibv_post_recv(id->qp, &receive, &bad_receive);
    } else {
        uint32_t key = word[4] ? (uint32_t)strtoul(word[4], NULL, 16) : 0;
        uint64_t address = word[4] && word[5] ? strtoull(word[5], NULL, 16) : 0;
        switch (word[0][0]) {
            case 's': send.opcode = IBV_WR_SEND; break;
            case 'i':
                send.opcode = IBV_WR_SEND_WITH_INV;
                send.invalidate_rkey = key;
                break;
            default:
                send.opcode = word[0][0] == 'w' ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
                send.wr.rdma.rkey = key;
                send.wr.rdma.remote_addr = address;
        }
        errno = ibv_post_send(id->qp, &send, &bad_send);
    }
    if (errno) return failed(word[0]);
    puts("posted");
}

static const char *operation_name(enum ibv_wc_opcode opcode) {
    switch (opcode) {
        case IBV_WC_SEND: return "send";
        case IBV_WC_RDMA_WRITE: return "write";
        case IBV_WC_RDMA_READ: return "read";
        case IBV_WC_RECV: return "receive";
        default: return "other";
    }
}

static void do_poll(char **word) {
    (void)word;
    struct ibv_wc completion;
    time_t end = time(NULL) + PATIENCE_S;
    int count;
    while ((count = ibv_poll_cq(cq, 1, &completion)) == 0 && time(NULL) < end) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    if (count != 1) {
        errno = count ? EIO : ETIMEDOUT;
        return failed("poll");
    }
    printf("completion %s %d %u\n", operation_name(completion.opcode), completion.status, completion.byte_len);
}

static void do_event(char **word) {
    (void)word;
    struct rdma_cm_event *event = next_event();
    if (!event) return failed("event");
    printf("event %s %d\n", rdma_event_str(event->event), event->status);
    rdma_ack_cm_event(event);
}

static void do_disconnect(char **word) {
    (void)word;
    if (rdma_disconnect(id) || expect(RDMA_CM_EVENT_DISCONNECTED)) return failed("disconnect");
    puts("disconnected");
}

static const struct {
    const char *name;
    int words;
    void (*run)(char **);
} commands[] = {
    {"listen", 3, do_listen},   {"request", 1, do_request}, {"accept", 4, do_accept}, {"reject", 2, do_reject},
    {"dial", 3, do_dial},       {"connect", 4, do_connect}, {"region", 3, do_region}, {"fill", 4, do_fill},
    {"dump", 4, do_dump},       {"receive", 4, do_post},    {"send", 4, do_post},     {"invalidate", 5, do_post},
    {"write", 6, do_post},      {"read", 6, do_post},       {"poll", 1, do_poll},     {"event", 1, do_event},
    {"disconnect", 1, do_disconnect}, {"resolve", 3, do_resolve}, {"ask", 4, do_ask}, {"look", 1, do_look},
};

int main(void) {
    char *line = NULL;
    size_t room = 0;
    channel = rdma_create_event_channel();
    if (!channel) {
        failed("make an event channel");
        return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 1 << 16);
    while (getline(&line, &room, stdin) > 0) {
        char *word[WORDS] = {0}, *rest = line;
        int count = 0;
        while (count < WORDS - 1 && (word[count] = strtok_r(rest, " \n", &rest))) count++;
        size_t at = 0, known = sizeof commands / sizeof *commands;
        while (at < known && (!word[0] || strcmp(word[0], commands[at].name))) at++;
        if (at == known || count != commands[at].words) {
            puts("error command: unknown, or not that many words");
        } else {
            commands[at].run(word);
        }
        fflush(stdout);
    }
    return 0;
}
