# 1: an upgrade. Established flows go on in the kernel while the new daemon takes them over.
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
    if [ "$1" -ge 1 ]; then
        systemctl try-restart slipgate.service || :
    fi
fi
