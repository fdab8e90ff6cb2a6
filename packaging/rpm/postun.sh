# 1: an upgrade. Established flows go on in the kernel while the new daemon takes them over.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    if [ "$1" -ge 1 ]; then
        systemctl try-restart slipgate.service || :
    fi
fi
# 0: the package is gone. Folders that have nothing of the administrator's go too, such as logs; and
# where others have pins, they have locks.
if [ "$1" = 0 ]; then
    for folder in /etc/slipgate /var/log/slipgate /var/lib/slipgate/snapshots /var/lib/slipgate \
        /usr/share/doc/slipgate/deploy /usr/share/doc/slipgate; do
        rmdir "$folder" 2>/dev/null || :
    done
    rmdir /sys/fs/bpf/slipgate 2>/dev/null || :
    [ -e /sys/fs/bpf/slipgate ] || rm -rf /run/slipgate
fi
