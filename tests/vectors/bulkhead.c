/*
 * Writes bulkhead.json: arguments and results of every procedure of program `bulkhead`, encoded by what rpcgen makes of
 * docs/bulkhead.x, so by nothing of Bulkhead's own. In the repository's root:
 *
 *     d=$(mktemp -d) && cp docs/bulkhead.x tests/vectors/bulkhead.c $d && (cd $d && rpcgen -N -h -o bulkhead.h bulkhead.x &&
 *     rpcgen -N -c -o xdr.c bulkhead.x && cc -I/usr/include/tirpc -o vectors bulkhead.c xdr.c -ltirpc && ./vectors) \
 *         > tests/vectors/bulkhead.json
 */
#include "bulkhead.h"
#include <stdio.h>

static char octets[1 << 16];
static const char *separator = "";

static void show(const char *id, xdrproc_t proc, void *value)
{
    XDR xdr;
    xdrmem_create(&xdr, octets, sizeof octets, XDR_ENCODE);
    if (!proc(&xdr, value, 0)) {
        fprintf(stderr, "%s cannot be encoded\n", id);
        return;
    }
    printf("%s\n  \"%s\": \"", separator, id);
    for (unsigned at = 0; at < xdr_getpos(&xdr); at++)
        printf("%02x", (unsigned char)octets[at]);
    printf("\"");
    separator = ",";
}
#define SHOW(id, type, value) show(id, (xdrproc_t)xdr_##type, &(value))

#define KEY(text) { sizeof text - 1, text }

int main(void)
{
    printf("{");
    bulkhead_key keys[] = { KEY("a"), KEY("chunk/0017"), KEY("four") };

    bulkhead_stat_args stat_args = { TRUE, { 3, keys } };
    SHOW("stat_args", bulkhead_stat_args, stat_args);
    bulkhead_stat stats[] = {
        { BULKHEAD_OK, 7, 0x1122334455667788, 1 << 20, 65536, 983040, 4096, 120, 3600 },
        { BULKHEAD_NOT_FOUND },
    };
    bulkhead_stat_res stat_res = { 1, { 2, stats } };
    SHOW("stat_res", bulkhead_stat_res, stat_res);

    bulkhead_range ranges[] = {
        { KEY("a"), 0, 0, 4294967295u },
        { KEY("chunk/0017"), 99, 17179869183ull, 1 },
    };
    bulkhead_get_args get_args = { TRUE, 2500, { 2, ranges } };
    SHOW("get_args", bulkhead_get_args, get_args);
    bulkhead_crc32c checksum = 0xe3069283;
    bulkhead_got got[] = {
        { BULKHEAD_OK, 7, 99, 9, &checksum, { 9, "123456789" } },
        { BULKHEAD_LATE, 0, 100, 1 << 30, NULL, { 0, NULL } },
    };
    bulkhead_get_res get_res = { { 2, got } };
    SHOW("get_res", bulkhead_get_res, get_res);

    bulkhead_put_args put_args = {
        KEY("chunk/0017"), 5, 9, 7, 60, { BULKHEAD_IF_VERSION, { 99 } }, TRUE, &checksum, { 9, "123456789" },
    };
    SHOW("put_args", bulkhead_put_args, put_args);
    bulkhead_put_args put_args_plain = { KEY("a"), 5, 1ull << 34, 0, 0, { BULKHEAD_IF_ABSENT }, FALSE, NULL, { 2, "hi" } };
    SHOW("put_args_plain", bulkhead_put_args, put_args_plain);
    bulkhead_put_more_args put_more_args = { 5, 1ull << 33, FALSE, NULL, { 4, "more" } };
    SHOW("put_more_args", bulkhead_put_more_args, put_more_args);
    bulkhead_put_res put_res = { BULKHEAD_OK, 100 };
    SHOW("put_res", bulkhead_put_res, put_res);
    bulkhead_put_drop_args put_drop_args = { 5 };
    SHOW("put_drop_args", bulkhead_put_drop_args, put_drop_args);
    bulkhead_status put_drop_res = BULKHEAD_BAD_DRAFT;
    SHOW("put_drop_res", bulkhead_status, put_drop_res);

    bulkhead_deletion deletions[] = { { KEY("a"), 0 }, { KEY("four"), 99 } };
    bulkhead_delete_args delete_args = { { 2, deletions } };
    SHOW("delete_args", bulkhead_delete_args, delete_args);
    bulkhead_touch touches[] = { { KEY("a"), 0 }, { KEY("four"), 86400 } };
    bulkhead_touch_args touch_args = { { 2, touches } };
    SHOW("touch_args", bulkhead_touch_args, touch_args);
    bulkhead_status status[] = { BULKHEAD_OK, BULKHEAD_CHANGED };
    bulkhead_statuses statuses = { { 2, status } };
    SHOW("statuses", bulkhead_statuses, statuses);

    bulkhead_list_args list_args = { KEY("chunk/"), KEY("chunk/0016"), 100, 1 << 16 };
    SHOW("list_args", bulkhead_list_args, list_args);
    bulkhead_entry entries[] = { { KEY("chunk/0017"), 99, 9 }, { KEY("chunk/0018"), 98, 17179869184ull } };
    bulkhead_list_res list_res = { BULKHEAD_OK, KEY("chunk/0018"), { 2, entries } };
    SHOW("list_res", bulkhead_list_res, list_res);

    bulkhead_keys pin_args = { { 3, keys } };
    SHOW("keys", bulkhead_keys, pin_args);
    bulkhead_pinned pinned[] = { { BULKHEAD_OK, 99 }, { BULKHEAD_LIMIT, 0 } };
    bulkhead_pin_res pin_res = { { 2, pinned } };
    SHOW("pin_res", bulkhead_pin_res, pin_res);
    printf("\n}\n");
    return 0;
}
