# A user's way with the package, on a Debian of its own. Each check is a line
#     ok NAME WHAT WAS SEEN    or    FAILED NAME WHY
cd /check || exit
ok() { echo "ok $*"; }
failed() { echo "FAILED $*"; }
# same NAME GOT WANTED
same() { if [ "$2" = "$3" ]; then ok "$1 $2"; else failed "$1 got '$2', not '$3'"; fi; }
at() { echo "at $(cut -d ' ' -f 1 /proc/uptime) s: $*"; }
state() { systemctl show --value -p ActiveState -p Result slipgate | tr '\n' ' '; }
# Puts the VM, and says how that was answered.
put_vm() {
    curl --silent --show-error --max-time 60 --unix-socket /run/slipgate-api.sock -o answer -w '%{http_code}' \
        -X PUT http://slipgate/v1/vms/web1 -d '{"tap": "tap7", "forwards": ["tcp:8007:7", "udp:8007:7"]}'
}
# What is left of the package: files, state, groups, processes, devices, programs, maps.
left() {
    find / -xdev -path /check -prune -o -name '*slipgate*' -print
    find /run /sys/fs/bpf -name '*slipgate*'
    getent group | grep slipgate
    readlink /proc/[0-9]*/exe | grep slipgate
    ip -o link | grep -o 'sgport[0-9]*'
    # systemd has programs of other types.
    bpftool prog | grep -E 'sched_cls|xdp'
    bpftool map | grep -E 'name (FLOWS|VMS|DROPS|COUNTERS) '
}
# The kernel frees programs and maps a moment later.
nothing_left() {
    for _ in 1 2 3 4 5 6 7 8 9; do [ -z "$(left)" ] && break; sleep 0.5; done
    same "$1" "$(left | tr '\n' ' ')" ""
}

at booted
ip netns add world
ip link add up0 type veth peer name w0 netns world
ip address add 198.18.0.2/24 dev up0
ip link set up0 up
ip -n world address add 198.18.0.1/24 dev w0
ip -n world address add 203.0.113.10/32 dev lo
ip -n world link set lo up
ip -n world link set w0 up
ip route add default via 198.18.0.1
ip netns exec world socat TCP-LISTEN:7,fork,reuseaddr,nodelay PIPE &

dpkg -i slipgate.deb >dpkg.log 2>&1 || failed dpkg "$(cat dpkg.log)"
same installed "$(dpkg-query -W -f '${Status}' slipgate)" "install ok installed"
same "not started" "$(state)" "success inactive "
systemctl --quiet enable slipgate
systemctl start slipgate
same started "$(state)" "success active "
at started

# The guest, by Debian's QEMU: it exchanges as a client, and then answers.
ip tuntap add tap7 mode tap vnet_hdr
same put "$(put_vm)" 201
qemu-system-x86_64 -M q35 -accel kvm -cpu qemu64 -m 128 -nodefaults -display none -no-reboot \
    -serial file:console -netdev tap,id=n,ifname=tap7,script=no,downscript=no \
    -device virtio-net-pci,netdev=n,romfile= -kernel guest \
    -append 'rr 203.0.113.10:7 100; serve 7 1000s' >qemu.log 2>&1 &
for _ in $(seq 300); do grep -qs '"serving"' console && break; sleep 0.2; done
same served "$(grep -o '"done":.*"failures":{}' console || tail -n 3 console qemu.log)" '"done":100,"failed":0,"failures":{}'
at served

# A machine of slipgate's own beside the service, which serves its TAP: from a shell its VMM has a
# jail. In a unit that is hardened like the service it has none, and says so or does not run.
# Answers with the exit status, and with what it said of the jail.
line='rr 203.0.113.10:7 20'
of_jail() {
    said=$(grep -o "the VMM \(is without\|has no\|can't have\)[^(:;]*" run.err)
    echo "$1" $said
}
slipgate run --jail required --cmdline "$line" >run.out 2>run.err </dev/null
same "jail from a shell" "$(of_jail $?)" 0
for jail in auto required; do
    {
        printf '[Service]\nType=oneshot\nDeviceAllow=/dev/kvm rw\n'
        printf 'StandardOutput=file:/check/run.out\nStandardError=file:/check/run.err\n'
        printf 'ExecStart=/usr/bin/slipgate run --jail %s --cmdline "%s"\n' $jail "$line"
        sed -n '/^CapabilityBoundingSet=/,/^SystemCallErrorNumber=/p' \
            "$(systemctl show --value -p FragmentPath slipgate)"
    } >/run/systemd/system/hardened.service
    systemctl daemon-reload
    rm -f run.out run.err
    systemctl start hardened 2>/dev/null
    status=$(systemctl show --value -p ExecMainStatus hardened)
    case $jail in
        auto) same "hardened, --jail auto" "$(of_jail "$status")" \
            '0 the VMM has no namespaces of its own' ;;
        required) same "hardened, --jail required" "$(of_jail "$status")" \
            "2 the VMM can't have namespaces of its own" ;;
    esac
    [ -s run.err ] && sed 's/^/# /' run.err
done
systemctl reset-failed hardened 2>/dev/null
rm -f /run/systemd/system/hardened.service
systemctl daemon-reload
at jailed

# All the while there is traffic, of flows that were there before.
ip netns exec world perl client.pl 198.18.0.2 8007 stop >client.log 2>&1 &
client=$!
sleep 2
process() { systemctl show --value -p MainPID slipgate; }
for n in 1 2; do
    before=$(process)
    systemctl restart slipgate
    same "restart $n" "$(state)" "success active "
    [ "$(process)" != "$before" ] || failed "restart $n" "it is the same process"
    sleep 1
done
before=$(process)
systemctl reload slipgate && same reload "$(state)$(process)" "success active $before"
dpkg -i slipgate.deb >dpkg.log 2>&1 || failed dpkg "$(cat dpkg.log)"
same upgrade "$(state)" "success active "
[ "$(process)" != "$before" ] || failed upgrade "it is the same process"
sleep 1
systemctl stop slipgate 2>/dev/null
same stop "$(state)" "success inactive "
sleep 2
touch stop
wait $client
case $(cat client.log) in
    'exchanges '???*' lost 0 sent again 0 '*) ok "traffic $(cat client.log)" ;;
    *) failed "traffic $(cat client.log)" ;;
esac
same processes "$(readlink /proc/[0-9]*/exe | grep slipgate)" ""
at stopped

# Of a service that is stopped, whose VM is in the kernel still; and of one that runs.
dpkg --purge slipgate >dpkg.log 2>&1 || failed dpkg "$(cat dpkg.log)"
nothing_left "purge after a stop"
dpkg -i slipgate.deb >dpkg.log 2>&1 && systemctl --quiet enable --now slipgate
same "put again" "$(put_vm)" 201
dpkg --purge slipgate >dpkg.log 2>&1 || failed dpkg "$(cat dpkg.log)"
nothing_left purge

# The other package, by the rpm that Debian has: not its system, but its files and scripts. Its groups
# stay, as is usual there.
rpm -i --nodeps slipgate.rpm >rpm.log 2>&1 || failed rpm "$(cat rpm.log)"
systemctl --quiet enable --now slipgate
same "put to the .rpm's" "$(put_vm)" 201
before=$(process)
rpm -U --nodeps --replacepkgs slipgate.rpm >rpm.log 2>&1 || failed rpm "$(cat rpm.log)"
same "upgrade by .rpm" "$(state)" "success active "
[ "$(process)" != "$before" ] || failed "upgrade by .rpm" "it is the same process"
systemctl stop slipgate 2>/dev/null
rpm -e slipgate >rpm.log 2>&1 || failed rpm "$(cat rpm.log)"
groupdel slipgate
groupdel slipgate-read
nothing_left "removal of the .rpm"
at purged
echo end
journalctl --unit slipgate --no-pager --output cat | tail -n 60
