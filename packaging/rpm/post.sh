systemd-sysusers slipgate.conf || :
systemd-tmpfiles --create slipgate.conf || :
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload || :
fi
