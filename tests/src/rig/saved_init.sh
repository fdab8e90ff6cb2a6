#!/bin/busybox sh
# The init of a Linux that is saved and restored: it counts, in memory and on its disk, says each number
# over one connection, and gives memory back.
. /start
mount -t tmpfs tmpfs /tmp

page() { timeout 10 wget -q -O - "http://$SERVER:$HTTP_PORT/hello"; }
# What the host has written to the disk for the guest to do.
order() { dd if=/dev/vda bs=512 skip=8 count=1 2>/dev/null | head -c 4; }

# A digest of what the CPU says of itself: Linux's driver asks it anew for each leaf.
cpuid() {
    {
        dd if=/dev/cpu/0/cpuid bs=16 count=14
        dd if=/dev/cpu/0/cpuid bs=16 skip=$((0x40000000 / 16)) count=2
        dd if=/dev/cpu/0/cpuid bs=16 skip=$((0x80000000 / 16)) count=9
    } 2>/dev/null >/tmp/cpuid
    # Of a leaf each.
    [ "$(wc -c </tmp/cpuid)" = 400 ] || failed cpuid "of $(wc -c </tmp/cpuid) bytes"
    md5sum </tmp/cpuid | cut -c 1-32
}

cpuid_before=$(cpuid)
lease
same before "$(page)" "$HELLO"

# A connection to who sends all back: what is written to 3 is to be read from 4. When it ends, 4 says so.
mkfifo /tmp/to /tmp/from
exec 3<>/tmp/to 4<>/tmp/from
{ nc "$SERVER" "$ECHO_PORT"; echo ended; } <&3 >&4 2>/dev/null &

# Memory that is used, until the host has seen that.
dd if=/dev/zero of=/tmp/used bs=1M count=64 2>/dev/null

# Linux says nothing of new random numbers before it has had any; the device of virtio-rng gives some.
head -c 1 /dev/random >/dev/null

# The number in memory is that on the disk, whoever was saved and restored in between.
number=0
while [ "$number" -lt 1000 ]; do
    on_disk=$(dd if=/dev/vda bs=512 count=1 2>/dev/null | head -n 1)
    [ "$on_disk" = "$number" ] || { failed "disk has '$on_disk', not '$number'"; break; }
    number=$((number + 1))
    printf '%s\n' "$number" | dd of=/dev/vda bs=512 conv=sync,fsync 2>/dev/null
    # The next number is to come from the disk.
    echo 1 >/proc/sys/vm/drop_caches

    connection=ended
    if [ -z "$is_over" ]; then
        echo "$number" >&3
        read -r -t 20 heard <&4 || heard=silent
        case $heard in
        "$number") connection=live ;;
        ended) is_over=yes ;;
        *) connection="heard-$heard" ;;
        esac
    fi
    read -r uptime _ </proc/uptime
    echo "counting $number uptime $uptime connection $connection"

    case $(order) in
    free) rm -f /tmp/used ;;
    over) break ;;
    esac
    usleep 100000
done
ok "counted $number"
same cpuid "$(cpuid)" "$cpuid_before"
# Linux has a driver for it from 5.18 on, where it is configured: ACPI's at first, the platform's since 6.10.
for bus in acpi platform; do
    [ -d /sys/bus/$bus/drivers/vmgenid ] || continue
    same reseeded "$(dmesg | grep -c 'crng reseeded due to virtual machine fork')" 1
done
same after "$(page)" "$HELLO"
echo end
poweroff -f
