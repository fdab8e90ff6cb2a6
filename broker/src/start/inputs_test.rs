use std::os::fd::OwnedFd;

use super::*;

#[test]
fn a_predecessor_s_metrics_socket_is_taken_over_in_both_families() {
    for any_port in ["127.0.0.1:0", "[::1]:0"] {
        let theirs = TcpListener::bind(any_port).unwrap();
        let address = theirs.local_addr().unwrap();
        // The predecessor's end of it stays open meanwhile.
        let passed: OwnedFd = theirs.try_clone().unwrap().into();
        let mut handed_over = HandedOver::from_iter([passed]);
        let taken = listen(address, &mut handed_over).unwrap();
        assert_eq!(taken.local_addr().unwrap(), address);
        // Another one would be refused its address.
        let refused = listen(address, &mut handed_over).unwrap_err().to_string();
        assert!(refused.contains("--metrics"), "{refused}");
    }
}
