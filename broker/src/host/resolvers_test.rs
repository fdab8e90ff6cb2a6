use super::*;

#[test]
fn the_file_is_followed_and_an_empty_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("resolv.conf");
    let write = |text: &str| fs::write(&file, text).unwrap();
    let at = |text: &str| vec![text.parse::<SocketAddr>().unwrap()];
    write("nameserver 192.0.2.1\n");
    let mut resolvers = HostResolvers::of(&file);
    assert_eq!(resolvers.now(), at("192.0.2.1:53"));
    assert_eq!(resolvers.changed(), None);
    write("nameserver 2001:db8::1\nnameserver 192.0.2.2\n");
    let both = [at("[2001:db8::1]:53"), at("192.0.2.2:53")].concat();
    assert_eq!(resolvers.changed(), Some(both));
    write("nameserver 2001:db8::1\nnameserver fe80::1%eth0\n");
    assert_eq!(resolvers.changed(), Some(at("[2001:db8::1]:53")));
    assert_eq!(resolvers.changed(), None);
    write("");
    assert_eq!(resolvers.changed(), None);
    fs::remove_file(&file).unwrap();
    assert_eq!(resolvers.changed(), None);
    assert_eq!(resolvers.now(), at("[2001:db8::1]:53"));
    write("nameserver 192.0.2.1\n");
    assert_eq!(resolvers.changed(), Some(at("192.0.2.1:53")));
}
