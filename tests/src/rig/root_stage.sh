#!/bin/busybox sh
# The init of an initramfs that does nothing but load the modules of the disk, and go on from there.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs devtmpfs /dev
while read -r module; do /bin/busybox insmod "$module"; done </modules/order
waited=0
while [ ! -b /dev/vda ] && [ "$waited" -lt 100 ]; do
    /bin/busybox usleep 100000
    waited=$((waited + 1))
done
/bin/busybox mkdir -p /disk
/bin/busybox mount -t ext4 /dev/vda /disk || echo "FAILED root the disk can't be mounted"
# Its init opens the console there.
/bin/busybox mount -o move /dev /disk/dev
/bin/busybox umount /proc
exec /bin/busybox switch_root /disk /sbin/init
