# What the init of each of the rig's Linux guests begins with (`. /start`): programs, mounts, console,
# the plan of what to find, modules. Then each check prints a line
#     ok NAME WHAT WAS SEEN    or    FAILED NAME WHY
# and the last line is `end`.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec >/dev/console 2>&1
. /plan
while read -r module; do insmod "$module"; done </modules/order

ok() { echo "ok $*"; }
failed() { echo "FAILED $*"; }
# same NAME GOT WANTED
same() { if [ "$2" = "$3" ]; then ok "$1 $2"; else failed "$1 got '$2', not '$3'"; fi; }
# Brings the network up, and takes a lease.
lease() {
    ip link set lo up
    ip link set eth0 up
    udhcpc -i eth0 -f -q -n -t 10 -T 1 -s /dhcp >/tmp/dhcp.log 2>&1 || failed lease "$(tail -n 1 /tmp/dhcp.log)"
}
