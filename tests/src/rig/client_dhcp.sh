#!/bin/busybox sh
# What udhcpc calls: takes the lease as it is offered.
[ "$1" = bound ] || [ "$1" = renew ] || exit 0
/bin/ip link set "$interface" mtu "${mtu:-1500}"
/bin/ip addr replace "$ip/$mask" dev "$interface"
/bin/ip route replace default via "$router" dev "$interface"
echo "nameserver $dns" >/etc/resolv.conf
echo "$ip/$mask via $router dns $dns mtu ${mtu:-none}" >/tmp/lease
