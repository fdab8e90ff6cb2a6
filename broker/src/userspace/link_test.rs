use std::fs::File;

use super::Link;

#[test]
fn nobody_changes_the_length_of_the_guests_memory() {
    let link = Link::rings(8 << 20).unwrap();
    let file = File::from(link.memory.unwrap());
    let length = file.metadata().unwrap().len();
    assert_eq!(length, (8 << 20) + 4_096);
    for other in [0, length - 1, length + 1] {
        assert!(file.set_len(other).is_err());
    }
}
