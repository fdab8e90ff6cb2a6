# 0: the package goes. Guests that nobody looks after must not go on.
if [ "$1" = 0 ] && [ -d /run/systemd/system ]; then
    if systemctl --quiet is-active slipgate.service; then
        slipgate stop || :
    fi
    systemctl disable --now slipgate.service slipgate-api.socket slipgate-read.socket || :
fi
