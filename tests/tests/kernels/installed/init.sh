#!/bin/busybox sh
# The init of the initramfs: loads the modules, puts the test's files into the Debian on the disk, and
# leaves the machine to Debian's systemd.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec >/dev/console 2>&1
while read -r module; do insmod "$module"; done </modules/order
mkdir -p /root
mount -t ext4 /dev/vda /root || poweroff -f
cp -r /check /root/check
units=/root/etc/systemd/system
cp /check/check.service $units/
mkdir -p $units/multi-user.target.wants
ln -s ../check.service $units/multi-user.target.wants/
# It would wait for the device in vain: the console is no terminal to log in at.
ln -s /dev/null $units/serial-getty@ttyS0.service
for mounted in proc sys dev; do mount -o move /$mounted /root/$mounted; done
exec switch_root /root /sbin/init
