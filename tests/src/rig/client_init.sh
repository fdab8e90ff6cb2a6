#!/bin/busybox sh
# The init of the rig's Linux client. /plan says what it should find.
. /start

digest() { sha256sum | cut -d ' ' -f 1; }
# Interrupts of the line that ends in $1, of all CPUs.
interrupts() {
    awk -v name="$1" '$NF ~ name"$" { for (i = 2; i <= NF; i++) if ($i ~ /^[0-9]+$/) n += $i } END { print n + 0 }' /proc/interrupts
}

# Should it hang: what it is at, for whoever reads the console.
(
    sleep 60
    echo "stuck after $(cat /proc/uptime)"
    ps
    netstat -tn
    cat /proc/interrupts
    for key in l w; do echo $key >/proc/sysrq-trigger; done
    dmesg | tail -n 150
) &

same cpus "$(grep -c ^processor /proc/cpuinfo)" "$CPUS"
queues=/sys/class/net/eth0/queues
same queues "$(ls -d $queues/rx-* | wc -l) $(ls -d $queues/tx-* | wc -l)" "$CPUS $CPUS"

lease
same lease "$(cat /tmp/lease)" "$LEASE"

ping -c 3 -i 0.2 -W 5 -q "$SERVER" >/tmp/ping.log 2>&1
same ping "$(grep -o '[0-9]* packets received' /tmp/ping.log)" "3 packets received"

resolved=$(nslookup "$NAME" 2>/tmp/dns.log | grep -A 9 "$NAME" | grep -o 'Address.*' | grep -o '[0-9.]*$' | head -n 1)
same dns "$resolved" "$SERVER"

same http "$(timeout 10 wget -q -O - "http://$NAME:$HTTP_PORT/hello")" "$HELLO"

# Each way twice at once, each from a CPU of its own, so that both queue pairs work.
for cpu in 0 1; do
    taskset $((1 << cpu)) timeout 30 wget -q -O /tmp/blob.$cpu "http://$SERVER:$HTTP_PORT/blob" &
    down="$down $!"
done
wait $down
for cpu in 0 1; do same "down.$cpu" "$(digest </tmp/blob.$cpu)" "$BLOB"; done

# Back up, each beginning elsewhere, so that no two streams are alike.
for cpu in 0 1; do
    tail -c +$((cpu * 4096 + 1)) /tmp/blob.$cpu >/tmp/sent.$cpu
    taskset $((1 << cpu)) nc "$SERVER" "$DIGEST_PORT" </tmp/sent.$cpu >/tmp/up.$cpu &
    up="$up $!"
done
wait $up
for cpu in 0 1; do same "up.$cpu" "$(cat /tmp/up.$cpu)" "$(digest </tmp/sent.$cpu)"; done

if nc -w 5 "$DENIED" "$HTTP_PORT" </dev/null >/tmp/denied 2>&1; then
    failed denied "a connection to $DENIED"
elif grep -q refused /tmp/denied; then
    ok denied "$(tail -n 1 /tmp/denied)"
else
    failed denied "$(tail -n 1 /tmp/denied)"
fi

# IPv6, by the kernel's own means: an address out of the advertised prefix and a default route.
for _ in $(seq 100); do
    address6=$(ip -6 -o addr show dev eth0 scope global | grep -v tentative | grep -o "$PREFIX6[0-9a-f:]*" | head -n 1)
    [ -n "$address6" ] && break
    usleep 100000
done
if [ -n "$address6" ]; then ok "address6 $address6"; else failed "address6 $(ip -6 addr show dev eth0)"; fi
ping6 -c 3 -i 0.2 -W 5 -q "$SERVER6" >/tmp/ping6.log 2>&1
same ping6 "$(grep -o '[0-9]* packets received' /tmp/ping6.log)" "3 packets received"
same http6 "$(timeout 10 wget -q -O - "http://$NAME6:$HTTP_PORT/hello")" "$HELLO"
same down6 "$(timeout 30 wget -q -O - "http://[$SERVER6]:$HTTP_PORT/blob" | digest)" "$BLOB"
if timeout 10 wget -q -O /dev/null "http://[$DENIED6]:$HTTP_PORT/hello" 2>/tmp/denied6; then
    failed denied6 "a page of $DENIED6"
elif grep -q refused /tmp/denied6; then
    ok denied6 "$(tail -n 1 /tmp/denied6)"
else
    failed denied6 "$(tail -n 1 /tmp/denied6)"
fi

# IPv6 alone, the resolver too.
ip -4 addr flush dev eth0
echo "nameserver ${PREFIX6}:1" >/etc/resolv.conf
resolved=$(nslookup "$NAME6" 2>/tmp/dns6.log | grep -A 9 "$NAME6" | grep -o 'Address.*' | grep -o '[0-9a-f:]*$' | head -n 1)
same dns6.alone "$resolved" "$SERVER6"
same http6.alone "$(timeout 10 wget -q -O - "http://$NAME6:$HTTP_PORT/hello")" "$HELLO"
same down6.alone "$(timeout 30 wget -q -O - "http://$NAME6:$HTTP_PORT/blob" | digest)" "$BLOB"

for line in input.0 output.0 input.1 output.1; do
    n=$(interrupts "virtio[0-9]*-$line")
    if [ "$n" -gt 0 ]; then ok "$line $n interrupts"; else failed "$line no interrupts: $(grep virtio /proc/interrupts)"; fi
done
echo end
poweroff -f
