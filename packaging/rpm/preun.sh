# 0: the package goes. Guests that nobody looks after must not go on.
if [ "$1" = 0 ]; then
    if [ -d /run/systemd/system ]; then
        # A daemon that was stopped has left its VMs in the kernel: only the next one can end them.
        if [ -e "/sys/fs/bpf/slipgate/$(stat -L -c %i /proc/self/ns/net)" ]; then
            systemctl start slipgate.service && slipgate stop || :
        fi
        systemctl stop slipgate.service slipgate-api.socket slipgate-read.socket || :
    fi
    systemctl --quiet disable slipgate.service slipgate-api.socket slipgate-read.socket || :
fi
