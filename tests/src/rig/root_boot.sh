#!/bin/busybox sh
# The init on the disk: it leaves a witness there, and goes on as the client.
/bin/busybox mount -t proc proc /proc
if /bin/busybox grep -Eq '^/dev/(vda|root) / ext4 rw' /proc/mounts; then
    # In two parts, so that it is nowhere on the disk but where this was run.
    echo "written by the root's" "own init" >/witness
    /bin/busybox sync
else
    echo "FAILED root $(/bin/busybox grep ' / ' /proc/mounts)"
fi
/bin/busybox umount /proc
exec /init.client
