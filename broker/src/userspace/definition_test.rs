use super::*;

#[test]
fn what_the_command_line_alone_decides_is_named() {
    let now = VmDefinition {
        mac: Some("52:54:00:12:34:56".into()),
        ip: Some("10.0.2.15".parse().unwrap()),
        forwards: vec!["tcp:8080:80".into()],
        ..VmDefinition::new("vm", "")
    };
    let changeable = VmDefinition {
        policy: Some("closed".into()),
        forwards: vec!["tcp:8081:80".into()],
        host_loopback: vec!["80/tcp".into()],
        idle_after: Some(5),
        labels: [("a".to_owned(), "b".to_owned())].into(),
        ..now.clone()
    };
    assert_eq!(other_field(&now, &changeable), None);
    let without = with_command_line(VmDefinition::new("vm", ""), &now);
    assert_eq!(other_field(&now, &without), None);
    assert_eq!((without.mac, without.ip), (now.mac.clone(), now.ip));
    assert_eq!(without.forwards, Vec::<String>::new(), "as a daemon has it");
    let on_tap = VmDefinition {
        tap: "tap0".into(),
        ..now.clone()
    };
    assert_eq!(other_field(&now, &on_tap), Some("tap"));
    let other = VmDefinition {
        mac: Some("52:54:00:12:34:57".into()),
        ..VmDefinition::new("vm", "")
    };
    let other = with_command_line(other, &now);
    assert_eq!(other_field(&now, &other), Some("mac"));
}
