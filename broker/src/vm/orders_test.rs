use super::*;

#[test]
fn sockets_of_killed_processes_go_and_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    let own = format!("{}.sock", process::id());
    // No process has an id above the kernel's limit.
    let names = [&*own, "4194999.sock", "notes", "4194999.txt"];
    for name in names {
        fs::write(dir.path().join(name), "").unwrap();
    }
    remove_left(dir.path());
    let left = |name: &&str| dir.path().join(name).exists();
    let left: Vec<_> = names.into_iter().filter(left).collect();
    assert_eq!(left, [&*own, "notes", "4194999.txt"]);
}
