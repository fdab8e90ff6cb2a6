#[test]
fn what_a_device_did_not_send_is_found() {
    let text = "Inter-|   Receive                                                |  Transmit\n \
         face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
         lo:       0       1    2    3    4     5          6         7        8       9   10   11   12    13      14         15\n  \
         tap0:0 0 0 7 0 0 0 0 0 0 0 42 0 0 0 0\n";
    let found = super::parse(text);
    assert_eq!(found["lo"], 11);
    assert_eq!(found["tap0"], 42);
    assert_eq!(found.len(), 2);
}
