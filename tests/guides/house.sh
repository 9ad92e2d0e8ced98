# A machine of the guides' own: `unshare -m -n sh house.sh COMMAND...`. What guides write to is memory
# that goes with it; /etc and the folders of systemd's are copies; ports are nobody else's.
set -eu
mount --make-rprivate /
for place in /etc /usr/lib/sysusers.d /usr/lib/tmpfiles.d; do
  [ -d "$place" ] || continue
  copy=$(mktemp -d)
  mount -t tmpfs guides "$copy"
  cp -a "$place/." "$copy/"
  mount --move "$copy" "$place"
  rmdir "$copy"
done
mount -t tmpfs guides /run
mount -t tmpfs guides /var/lib
ip link set lo up
exec "$@"
